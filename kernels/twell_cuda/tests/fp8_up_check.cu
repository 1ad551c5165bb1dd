// Checks the e4m3 up projection against plain double loops over the quantized values, in poisoned memory, behind the
// e4m3 gate and its lists: sums that the tensor cores hold exactly, bit by bit; scales of 0, infinity and NaN; and
// ordinary values, whose sums they round. Then whole calls of e4m3 weights, as host/dispatch.cpp runs them.
//
// Built by kernels/tests/check_cuda.sh.
//   ./fp8_up_check         checks      ./fp8_up_check verbose
//
// Exits 1 on any mismatch or CUDA error. fp8_gate_check times this kernel.

#include "tests/fp8_prefill.cuh"
#include "tests/fp8_up_data.cuh"

namespace {

using namespace twell;
using namespace checks;

struct Found {
  int64_t wrong = 0;     // values of h
  int64_t touched = 0;   // of columns that must not be
  int64_t compared = 0;  // values of h, of tokens that there are
  int64_t nonzero = 0;   // of these, that should not be 0
  int64_t nan = 0;       // or should be NaN
  double error = 0, norm = 0;
};

// What up left in place of `gates`. `slack`: of each sum, 0 where it is exact.
template <typename Half>
Found compare(const UpCall<Half>& call, const sm90::Active& active, const std::vector<uint32_t>& masks,
              const std::vector<uint16_t>& gates, const std::vector<uint16_t>& columns, uint16_t poison, float slack) {
  Found found;
  const Case& c = call.gate.c;
  const auto value = [](uint16_t bits) { return static_cast<float>(reinterpret_cast<const Half&>(bits)); };
  for (int64_t half = 0; half < 2 * active.blocks; ++half) {
    for (int n = 0; n < c.width; ++n) {
      const int64_t at = ((half / 2 * c.width + n) * 2 + half % 2) * 64;
      const bool set = masks[half * active.words + n / 32] >> n % 32 & 1;
      const bool odd_scale = !std::isfinite(call.neuron_scales[n]) || !std::isfinite(call.gate.neuron_scales[n]);
      for (int i = 0; i < 64; ++i) {
        const int64_t t = half * 64 + i;
        if (!set) {
          found.touched += columns[at + i] != poison;
          continue;
        }
        const float gate = value(gates[at + i]), got = value(columns[at + i]);
        if (t >= c.tokens) {  // past the end; 0 times infinity or NaN is NaN there
          found.wrong += got != 0 && !odd_scale;
          continue;
        }
        const double up = call.ups[t * c.width + n];
        const float want = gate * static_cast<float>(up);  // where sums are exact, so is the second factor
        ++found.compared;
        found.nonzero += want != 0;
        found.nan += std::isnan(want);
        if (std::isnan(want) || std::isnan(got)) {
          found.wrong += std::isnan(want) != std::isnan(got);
        } else if (slack == 0) {
          found.wrong += got != static_cast<float>(Half(want));
        } else {
          const double off = std::fabs(gate) * slack * call.sizes[t * c.width + n] + std::fabs(want) / 128 + 1e-6;
          found.wrong += std::fabs(got - want) > off;
          found.error += (got - want) * (got - want), found.norm += want * want;
        }
      }
    }
  }
  return found;
}

struct Totals {
  int64_t cases = 0, compared = 0, nonzero = 0, nan = 0;
  Tiles tiles;
};

template <typename Half>
bool check(const Case& c, const Device& device, bool verbose, Totals& totals) {
  UpCall<Half> call(c);
  const Ffn f = call.ffn();
  Guarded<char> workspace(gate_workspace_bytes(f));
  const sm90::Chunk chunk = chunk_of(f, workspace.data());
  const sm90::Active& active = chunk.active;
  const sm90::QuantizedRows x = call.gate.x.view();
  const auto copy = [](auto& to, const void* from) {
    CHECK(cudaMemcpy(to.data(), from, to.size() * sizeof(to[0]), cudaMemcpyDeviceToHost));
  };
  // An instruction cuts off 2^-13 of the sizes' sum from several addends; all together show that sums are right.
  const float slack = c.data == Data::kNormal ? ((c.hidden + 31) / 32 + 1) * 8 / 8192.f : 0.f;
  bool ok = true;
  for (const bool many : {false, true}) {
    Found found;
    bool same = true, intact = true, masks_stay = true;
    std::vector<uint16_t> results[2];
    for (int run = 0; run < 2; ++run) {  // two poisons, one result
      workspace.poison(run == 0 ? 0xff : 0x7e);
      const uint16_t poison = run == 0 ? 0xffff : 0x7e7e;
      const int64_t column_count = int64_t{active.blocks} * c.width * sm90::kBlockTokens;
      std::vector<uint32_t> masks(int64_t{2} * active.blocks * active.words), masks_after(masks.size());
      std::vector<uint16_t> gates(column_count), columns(column_count), neurons(int64_t{active.blocks} * active.row);
      std::vector<sm90::Counts> counts(active.blocks);
      CHECK(sm90::launch_gate_fp8(f, x, chunk, device, nullptr));
      CHECK(sm90::launch_list(f, chunk, device, nullptr));
      CHECK(cudaDeviceSynchronize());
      copy(masks, active.masks), copy(gates, active.columns), copy(counts, active.counts);
      copy(neurons, active.neurons);
      CHECK(sm90::launch_up_fp8_as(f, x, chunk, device, nullptr, many));
      CHECK(cudaDeviceSynchronize());
      copy(masks_after, active.masks), copy(columns, active.columns);
      found = compare(call, active, masks, gates, columns, poison, slack);
      intact &= workspace.intact();
      masks_stay &= masks == masks_after;
      // What no one touches keeps the poison, of which there are two.
      for (uint16_t& word : columns) word = word == poison ? 0 : word;
      results[run] = columns;
      same &= results[run] == results[0];
      if (run == 0 && !many) totals.tiles.add(tiles_of(counts, neurons, active.row, device));
      if (found.wrong != 0 || found.touched != 0) break;
    }
    const double relative = found.norm > 0 ? std::sqrt(found.error / found.norm) : 0;
    // Of few gates none may be above 0, of which biases push most down.
    const bool some = found.nonzero > 0 || c.tokens * c.width < (c.biases ? 20000 : 1000);
    const bool right =
        found.wrong == 0 && found.touched == 0 && same && intact && masks_stay && some && relative < 1. / 64;
    if (verbose || !right || c.report) {
      std::printf("%-4s %s T=%-5d D=%-4d F=%-4d %s%s%s: wrong %lld of %lld (%lld not 0), touched %lld%s%s%s%s",
                  right ? "ok" : "BAD", name_of<Half>(), c.tokens, c.hidden, c.width, name_of(c.data),
                  c.biases ? " biases" : "", many ? ", for many blocks" : "", static_cast<long long>(found.wrong),
                  static_cast<long long>(found.compared), static_cast<long long>(found.nonzero),
                  static_cast<long long>(found.touched), same ? "" : ", two runs differ",
                  intact ? "" : ", wrote past the end", masks_stay ? "" : ", masks changed", some ? "" : ", all 0");
      if (c.data == Data::kNormal) std::printf(", error %.6f", relative);
      std::printf("\n");
      std::fflush(stdout);
    }
    ok &= right;
    ++totals.cases, totals.compared += found.compared, totals.nonzero += found.nonzero, totals.nan += found.nan;
  }
  return ok;
}

bool check_up(const Device& device, bool verbose) {
  bool ok = true;
  Totals totals;
  const auto both = [&](const Case& c) {
    ok &= check<__nv_bfloat16>(c, device, verbose, totals);
    ok &= check<__half>(c, device, verbose, totals);
  };
  const int shapes[][2] = {{16, 1},    {16, 257},  {48, 100},   {128, 64},  {144, 769},
                           {256, 130}, {272, 515}, {1040, 321}, {2064, 321}};
  for (const auto& s : shapes) {
    for (const int tokens : {1, 64, 65, 129, 257, 300}) {
      both({tokens, s[0], s[1], Data::kExact, true});
      both({tokens, s[0], s[1], Data::kExact, false});
    }
    both({193, s[0], s[1], Data::kSpecial, false});
    both({257, s[0], s[1], Data::kSpecial, true});
    both({200, s[0], s[1], Data::kNormal, true});
  }
  // Several tiles for each thread block, of one step and of more than the ring has stages; rows that are neighbours.
  for (const int hidden : {16, 144, 1168}) both({5000, hidden, 1100, Data::kExact, true});
  both({5000, 144, 1100, Data::kExact, false});
  both({8100, 144, 512, Data::kExact, false});
  both({8192, 16, 512, Data::kSpecial, false});
  both({4096, 48, 5632, Data::kExact, true});
  both({4096, 48, 5632, Data::kNormal, false});
  for (const int hidden : {2048, 4096}) both({256, hidden, 512, Data::kNormal, false, false, true});
  const Tiles& t = totals.tiles;
  // Else the cases above do not reach what they are for.
  const bool reached = t.neighbours > 0 && t.half_empty > 0 && t.wide > 0 && t.wide < t.all && t.most_in_turn > 2 &&
                       totals.nan > 0 && totals.nonzero > totals.compared / 100;
  std::printf("%s up: %lld cases, %lld values, %lld of them not 0, %lld NaN; %lld tiles, %lld of neighbours, %lld with "
              "an empty half, %lld of two stages, up to %lld in turn\n",
              ok && reached ? "ok  " : "BAD ", static_cast<long long>(totals.cases),
              static_cast<long long>(totals.compared), static_cast<long long>(totals.nonzero),
              static_cast<long long>(totals.nan), static_cast<long long>(t.all), static_cast<long long>(t.neighbours),
              static_cast<long long>(t.half_empty), static_cast<long long>(t.wide),
              static_cast<long long>(t.most_in_turn));
  Call<__half> odd({1, 24, 8, Data::kExact, false});  // D no multiple of 16
  const sm90::Chunk none{};
  const bool refused = sm90::launch_up_fp8(odd.ffn(), odd.x.view(), none, device, nullptr) == cudaErrorInvalidValue;
  if (!refused) std::printf("BAD  D = 24 is not refused\n");
  return ok && reached && refused;
}

}  // namespace

int main(int argc, char** argv) {
  const Device device = read_device();
  const bool verbose = argc > 1 && std::string(argv[1]) == "verbose";
  const bool up = check_up(device, verbose), calls = check_calls(device, verbose);
  std::printf("%s\n", up && calls ? "all right" : "FAILED");
  return up && calls ? 0 : 1;
}
