// The active (token, neuron) pairs of a feed-forward block, in the two orders that its products need.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "twell_state.h"

namespace twell {

// A vector whose new elements are not filled: one thread would, and they are written by all soon after.
template <class T>
struct Unfilled : std::allocator<T> {
  template <class U>
  struct rebind {
    using other = Unfilled<U>;
  };
  template <class U>
  void construct(U* element) noexcept {
    ::new (static_cast<void*>(element)) U;
  }
  template <class U, class... Args>
  void construct(U* element, Args&&... args) {
    ::new (static_cast<void*>(element)) U(std::forward<Args>(args)...);
  }
};
template <class T>
using Values = std::vector<T, Unfilled<T>>;

// Token-major (compressed rows): neurons ascend within a token. h = gate * up; up is 1 in a block without a gate.
struct TokenPairs {
  std::vector<int64_t> begin;  // tokens + 1
  Values<uint32_t> neuron;
  Values<float> gate, up;
};

// Neuron-major: tokens ascend within a neuron. `source` is the pair's place in the token-major order.
struct NeuronPairs {
  std::vector<int64_t> begin;  // neurons + 1
  std::vector<uint32_t> token;
  std::vector<int64_t> source;
};

// Memory that is never filled before it is written. It starts with a cache line: a vector across two takes two loads.
class Bytes {
 public:
  void reserve(int64_t size) {
    if (size <= size_) return;
    memory_.reset(static_cast<char*>(::operator new(static_cast<size_t>(size), kLine)));
    size_ = size;
  }
  char* data() { return memory_.get(); }
  const char* data() const { return memory_.get(); }

 private:
  static constexpr std::align_val_t kLine{64};
  struct Free {
    void operator()(char* memory) const { ::operator delete(memory, kLine); }
  };
  std::unique_ptr<char, Free> memory_;
  int64_t size_ = 0;
};

// What one thread has packed: TwELL with tiles of neurons, its slots in a pool that grows instead of overflowing.
struct LanePairs {
  struct Run {
    uint32_t neuron;
    int64_t begin;
    int64_t count;
  };
  std::vector<Run> runs;
  Values<uint32_t> token;
  Values<float> gate, up;
  int64_t used = 0;

  void clear() {
    runs.clear();
    used = 0;
  }
  void reserve(int64_t extra) {
    if (used + extra <= static_cast<int64_t>(token.size())) return;
    const size_t size = static_cast<size_t>(2 * (used + extra));
    token.resize(size);
    gate.resize(size);
    up.resize(size);
  }
};

// The saved state: per token a count (or why there is none) and, behind one another, its pairs.
//
// Layout: int32 count[tokens] | element gate[slots] | element up[slots] (gated only) | uint16 neuron[slots], of the
// sizes in twell_state.h. slots = tokens * capacity.
struct State {
  static constexpr int32_t kRecompute = -1;  // more pairs than slots: backward computes them again from x
  static constexpr int32_t kDense = -2;      // so many pairs that the dense products are faster

  int32_t* count = nullptr;
  uint16_t* neuron = nullptr;
  char* gate = nullptr;
  char* up = nullptr;
  int64_t slots = 0;

  static int64_t bytes(int64_t tokens, int64_t capacity, int64_t element, bool gated) {
    return tokens * cpu_state_layout(capacity, element, gated).bytes();
  }
  static State at(void* memory, int64_t tokens, int64_t capacity, int64_t element, bool gated) {
    const CpuStateLayout layout = cpu_state_layout(capacity, element, gated);
    State state;
    char* next = static_cast<char*>(memory);
    state.slots = tokens * capacity;
    state.count = reinterpret_cast<int32_t*>(next);
    state.gate = next += tokens * layout.count;
    state.up = gated ? next + tokens * layout.gate : nullptr;
    state.neuron = reinterpret_cast<uint16_t*>(next + tokens * (layout.gate + layout.up));
    return state;
  }
};

}  // namespace twell
