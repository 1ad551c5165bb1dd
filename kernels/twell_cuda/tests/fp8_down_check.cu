// Checks the e4m3 down projection against plain double loops, in poisoned memory: sums that the tensor cores hold
// exactly, bit by bit, with each width of slices; every e4m3 value, NaN too; scales of 0, infinity and NaN.
//
// Built by kernels/tests/check_cuda.sh.
//   ./fp8_down_check         checks      ./fp8_down_check verbose
//
// Exits 1 on any mismatch or CUDA error. fp8_gate_check times this kernel.

#include "tests/fp8_down_data.cuh"

namespace {

using namespace twell;
using namespace checks;

struct Found {
  int64_t wrong = 0, compared = 0, nonzero = 0, nan = 0, infinite = 0;
};

template <typename Half>
Found compare(const DownCall<Half>& call, const std::vector<Half>& got) {
  Found found;
  for (int64_t i = 0; i < static_cast<int64_t>(got.size()); ++i) {
    const double want = call.want[i];
    const float value = static_cast<float>(got[i]);
    // Where a NaN of Wd meets a 0 of h that stands for nothing, either may come out.
    if (call.spoilt[i] && !std::isnan(want) && std::isnan(value)) continue;
    ++found.compared, found.nonzero += want != 0, found.nan += std::isnan(want), found.infinite += std::isinf(want);
    const float rounded = static_cast<float>(Half(static_cast<float>(want)));
    found.wrong += std::isnan(want) ? !std::isnan(value) : value != rounded;
  }
  return found;
}

struct Totals {
  int64_t cases = 0;
  Found found;
  Steps steps;
};

template <typename Half>
bool check(const DownCase& c, const Device& device, bool verbose, Totals& totals) {
  DownCall<Half> call(c);
  bool ok = true;
  for (const int slice : {0, 128, 256}) {  // 0: as chosen
    Found found;
    bool same = true, intact = true;
    std::vector<Half> results[2];
    for (int run = 0; run < 2; ++run) {  // two poisons, one result
      call.y.poison(run == 0 ? 0xff : 0x7e);
      CHECK(call.launch(slice, device));
      CHECK(cudaDeviceSynchronize());
      results[run] = call.y.get();
      found = compare(call, results[run]);
      intact &= call.y.intact();
      same &= std::memcmp(results[run].data(), results[0].data(), results[0].size() * sizeof(Half)) == 0;
    }
    const bool right = found.wrong == 0 && same && intact;
    if (verbose || !right) {
      std::printf("%-4s %s T=%-5d D=%-5d F=%-5d %s%s%s, slices of %d: wrong %lld of %lld (%lld not 0)%s%s\n",
                  right ? "ok" : "BAD", name_of<Half>(), c.tokens, c.hidden, c.width, name_of(c.list),
                  c.special ? " special" : "", c.biases ? " biases" : "", slice,
                  static_cast<long long>(found.wrong), static_cast<long long>(found.compared),
                  static_cast<long long>(found.nonzero), same ? "" : ", two runs differ",
                  intact ? "" : ", wrote past the end");
      std::fflush(stdout);
    }
    ok &= right;
    ++totals.cases;
    totals.found.compared += found.compared, totals.found.nonzero += found.nonzero;
    totals.found.nan += found.nan, totals.found.infinite += found.infinite;
  }
  totals.steps.add(call.steps);
  return ok;
}

bool check_all(const Device& device, bool verbose) {
  bool ok = true;
  Totals totals;
  const auto both = [&](const DownCase& c) {
    ok &= check<__nv_bfloat16>(c, device, verbose, totals);
    ok &= check<__half>(c, device, verbose, totals);
  };
  constexpr List kLists[] = {List::kNone, List::kFew, List::kHalf, List::kAll, List::kFirst, List::kSecond,
                             List::kRuns, List::kMixed};
  // D cuts a slice, a part of 128 and a warp's units in every way.
  for (const int hidden : {16, 48, 112, 128, 144, 240, 256, 272, 400, 528}) {
    for (const List list : kLists) both({129, hidden, 300, list, hidden % 32 == 16, false});
  }
  for (const int tokens : {1, 2, 7, 63, 64, 65, 66, 127, 128, 191, 257}) {
    both({tokens, 144, 321, List::kMixed, true, false});
    both({tokens, 272, 200, List::kMixed, false, true});
  }
  for (const int width : {1, 15, 16, 17, 63, 64, 65, 128, 700}) {
    for (const List list : {List::kHalf, List::kAll, List::kMixed}) both({200, 208, width, list, false, true});
  }
  for (const List list : kLists) both({300, 304, 515, list, true, true});
  // Lists of more neurons than lie in shared memory at a time, and as many.
  for (const int width : {2048, 2049, 4200}) {
    for (const List list : {List::kAll, List::kHalf}) both({200, 144, width, list, true, true});
  }
  // Several tiles for each thread block, of all kinds, and blocks without any neuron between them.
  both({32768, 144, 300, List::kMixed, true, true});
  both({5000, 2064, 400, List::kMixed, true, true});
  both({2500, 4096, 130, List::kMixed, false, false});
  both({200, 16384, 200, List::kMixed, false, true});
  const Found& f = totals.found;
  const Steps& s = totals.steps;
  // Else the cases above do not reach what they are for.
  const bool reached = s.neighbours > 0 && s.first > 0 && s.second > 0 && s.both > 0 && s.empty > 0 && f.nan > 0 &&
                       f.infinite > 0 && f.nonzero > f.compared / 8;
  std::printf("%s %lld cases, %lld values, %lld of them not 0, %lld NaN, %lld infinite; %lld steps of neighbours, %lld "
              "of the first half, %lld of the second, %lld of both, %lld empty blocks\n",
              ok && reached ? "ok  " : "BAD ", static_cast<long long>(totals.cases),
              static_cast<long long>(f.compared), static_cast<long long>(f.nonzero), static_cast<long long>(f.nan),
              static_cast<long long>(f.infinite), static_cast<long long>(s.neighbours), static_cast<long long>(s.first),
              static_cast<long long>(s.second), static_cast<long long>(s.both), static_cast<long long>(s.empty));
  Ffn odd{};
  odd.hidden = 24, odd.down.row_stride = 24;  // no multiple of 16
  const bool refused = sm90::launch_down_fp8(odd, {}, device, nullptr) == cudaErrorInvalidValue;
  if (!refused) std::printf("BAD  D = 24 is not refused\n");
  return ok && reached && refused;
}

}  // namespace

int main(int argc, char** argv) {
  const bool ok = check_all(read_device(), argc > 1 && std::string(argv[1]) == "verbose");
  std::printf("%s\n", ok ? "all right" : "FAILED");
  return ok ? 0 : 1;
}
