// Checks the e4m3 gate against plain double loops over the quantized values, in poisoned memory: sums that the tensor
// cores hold exactly, bit by bit, with every tile width; scales of 0, infinity and NaN; and ordinary values, whose sums
// they round, with and without promotion. Or times it, up, down and what goes with them, beside the 16-bit kernels.
//
// Built by kernels/tests/check_cuda.sh.
//   ./fp8_gate_check         checks      ./fp8_gate_check time      times      ./fp8_gate_check verbose
//
// Exits 1 on any mismatch or CUDA error.

#include "tests/fp8_gate_data.cuh"
#include "tests/fp8_gate_time.cuh"

namespace {

using namespace twell;
using namespace checks;

// Ways to launch the gate: as chosen, promoted, and each tile width in blocks of one and clusters of two.
template <typename Half>
std::vector<Way> ways_of(bool every) {
  std::vector<Way> ways{{"as chosen", sm90::kPromoteSums, sm90::launch_gate_fp8},
                        {"promoted", true, sm90::gate::launch_fp8<true>}};
  if (!every) return ways;
  const int cuts[][2] = {{64, 64}, {96, 96}, {128, 128}, {192, 192}, {256, 256}, {256, 128}, {256, 96}, {256, 64}};
  for (const auto& cut : cuts) {
    const int unit = cut[0], last = cut[1];
    const std::string name = std::to_string(unit) + (last == unit ? "" : ", then " + std::to_string(last));
    ways.push_back({name, false, launch_cut<Half, false, 1>(unit, last)});
    ways.push_back({name + ", clusters", false, launch_cut<Half, false, 2>(unit, last)});
    if (unit > sm90::gate::kMostPromoted) continue;
    ways.push_back({name + ", promoted", true, launch_cut<Half, true, 1>(unit, last)});
    ways.push_back({name + ", promoted, clusters", true, launch_cut<Half, true, 2>(unit, last)});
  }
  return ways;
}

struct Found {
  int64_t wrong = 0;    // values and masks
  int64_t touched = 0;  // columns and bits that must not be
  int64_t extra = 0;    // columns that are written although no token activates their neuron
  double error = 0, norm = 0;
};

// What the gate left against what it should have. `slack`: of each sum, 0 where it is exact.
template <typename Half>
Found compare(const Call<Half>& call, const sm90::Active& active, const std::vector<uint32_t>& masks,
              const std::vector<uint16_t>& columns, uint16_t poison, float slack) {
  Found found;
  const Case& c = call.c;
  for (int64_t half = 0; half < 2 * active.blocks; ++half) {
    const int64_t block = half / 2, first = half * 64;
    for (int n = 0; n < active.words * 32; ++n) {
      const bool set = masks[half * active.words + n / 32] >> n % 32 & 1;
      if (n >= c.width) {
        found.touched += set;
        continue;
      }
      const uint16_t* column = columns.data() + ((block * c.width + n) * 2 + half % 2) * 64;
      const bool odd_scale = !std::isfinite(call.neuron_scales[n]);  // 0 x NaN of tokens past the end is NaN
      bool must = false, some = false;
      for (int i = 0; i < 64; ++i) {
        const int64_t t = first + i;
        const double want = t < c.tokens ? call.gates[t * c.width + n] : 0.;
        double off = 0;  // that a value may be
        if (t < c.tokens && slack > 0) off = slack * call.sizes[t * c.width + n] + std::fabs(want) / 128;
        must |= std::isnan(want) || want > off;
        some |= want != 0;
        if (!set) {
          found.touched += column[i] != poison;
          continue;
        }
        if (t >= c.tokens && odd_scale) continue;
        const float got = static_cast<float>(reinterpret_cast<const Half&>(column[i]));
        if (std::isnan(want) || std::isnan(got)) {
          found.wrong += std::isnan(want) != std::isnan(got);
        } else if (slack == 0) {
          found.wrong += got != static_cast<float>(Half(static_cast<float>(want)));
        } else {
          found.wrong += std::fabs(got - want) > off;
          found.error += (got - want) * (got - want), found.norm += want * want;
        }
      }
      found.wrong += must && !set;
      found.extra += set && !some && !odd_scale;
    }
  }
  return found;
}

template <typename Half>
bool check(const Case& c, const Device& device, bool verbose) {
  Call<Half> call(c);
  const Ffn f = call.ffn();
  Guarded<char> workspace(gate_workspace_bytes(f));
  const sm90::Chunk chunk = chunk_of(f, workspace.data());
  const sm90::QuantizedRows x = call.x.view();
  const int64_t mask_count = int64_t{2} * chunk.active.blocks * chunk.active.words;
  const int64_t column_count = int64_t{chunk.active.blocks} * c.width * sm90::kBlockTokens;
  bool ok = true;
  for (const Way& way : ways_of<Half>(c.every_way)) {
    // No sum on the way exceeds the sum of sizes, and an instruction cuts off 2^-13 of it from several addends. What
    // shows that sums are right is the error of all together; kExact leaves no room at all.
    const float cuts = static_cast<float>(way.promote ? 4 : (c.hidden + 31) / 32);
    const float slack = c.data == Data::kNormal ? (cuts + 1) * 8 / 8192.f : 0.f;
    Found found;
    bool same = true, intact = true;
    std::vector<uint32_t> masks[2];
    for (int run = 0; run < 2; ++run) {  // two poisons, one result
      workspace.poison(run == 0 ? 0xff : 0x7e);
      CHECK(way.launch(f, x, chunk, device, nullptr));
      CHECK(cudaDeviceSynchronize());
      masks[run].resize(mask_count);
      std::vector<uint16_t> columns(column_count);
      CHECK(cudaMemcpy(masks[run].data(), chunk.active.masks, mask_count * 4, cudaMemcpyDeviceToHost));
      CHECK(cudaMemcpy(columns.data(), chunk.active.columns, column_count * 2, cudaMemcpyDeviceToHost));
      found = compare(call, chunk.active, masks[run], columns, run == 0 ? 0xffff : 0x7e7e, slack);
      intact &= workspace.intact();
      same &= masks[run] == masks[0];
      if (found.wrong != 0 || found.touched != 0) break;
    }
    const double relative = found.norm > 0 ? std::sqrt(found.error / found.norm) : 0;
    // Nearly full tiles are called full; of sparse ones only the last, of few neurons, can be.
    const bool sparse = c.biases && c.data == Data::kExact && c.width >= 64;
    const bool right = found.wrong == 0 && found.touched == 0 && same && intact && relative < 1. / 32 &&
                       (!sparse || found.extra <= int64_t{8} * chunk.active.blocks);
    if (verbose || !right || c.report) {
      std::printf("%-4s %s T=%-4d D=%-4d F=%-4d %s%s: wrong %lld, touched %lld, extra %lld%s%s", right ? "ok" : "BAD",
                  name_of<Half>(), c.tokens, c.hidden, c.width, name_of(c.data), c.biases ? " biases" : "",
                  static_cast<long long>(found.wrong), static_cast<long long>(found.touched),
                  static_cast<long long>(found.extra), same ? "" : ", two runs differ",
                  intact ? "" : ", wrote past the end");
      if (c.data == Data::kNormal) std::printf(", error %.6f", relative);
      std::printf("  (%s)\n", way.name.c_str());
      std::fflush(stdout);
    }
    ok &= right;
  }
  return ok;
}

bool check_all(const Device& device, bool verbose) {
  bool ok = true;
  int cases = 0;
  const auto both = [&](const Case& c) {
    ok &= check<__nv_bfloat16>(c, device, verbose);
    ok &= check<__half>(c, device, verbose);
    cases += 2;
  };
  // Every tile width, where T, D and F are cut in every way. D = 24: rows of x and Wg have 8 bytes of padding.
  const int shapes[][2] = {{16, 1}, {24, 65}, {48, 100}, {112, 257}, {128, 64}, {144, 769}, {272, 515}, {2064, 321}};
  for (const auto& s : shapes) {
    for (const int tokens : {1, 64, 65, 129, 300}) both({tokens, s[0], s[1], Data::kExact, tokens != 64, true});
    both({193, s[0], s[1], Data::kSpecial, false, true});
    both({257, s[0], s[1], Data::kSpecial, true});
    both({200, s[0], s[1], Data::kNormal, true, true});
  }
  for (int tokens = 2; tokens <= 300; tokens += 13) both({tokens, 80, 161, Data::kExact, tokens % 2 == 0});
  for (const int hidden : {16, 32, 96, 128, 160, 256, 384, 1008, 2048, 4096}) {
    both({130, hidden, 200, Data::kExact, true});
    both({130, hidden, 200, Data::kNormal, false});
  }
  // Several rounds of tiles for each thread block, and a last round that is cut.
  both({5000, 144, 1100, Data::kExact, true});
  both({4096, 48, 5632, Data::kExact, true});
  both({4096, 48, 5632, Data::kNormal, false});
  // How accurate sums are, with and without promotion, at the depth of a model.
  for (const int hidden : {2048, 4096}) both({256, hidden, 512, Data::kNormal, false, false, true});
  std::printf("%d cases: %s\n", cases, ok ? "all right" : "FAILED");
  return ok;
}

}  // namespace

int main(int argc, char** argv) {
  const Device device = read_device();
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "time") {
    for (const int tokens : {1024, 4096, 16384}) time_gates(tokens, device);
    return 0;
  }
  return check_all(device, mode == "verbose") ? 0 : 1;
}
