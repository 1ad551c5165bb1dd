// Work shared between threads. The launcher supplies the thread pool, so that kernels stay free of any framework.
#pragma once

#include <atomic>
#include <cstdint>

namespace twell {

struct Threads {
  int count;
  // Calls body(context, begin, end) over a partition of [0, count).
  void (*run)(int64_t count, void (*body)(int64_t begin, int64_t end, void* context), void* context);
};

// body(lane) once for each lane, at the same time where threads allow it.
template <class Body>
void for_lanes(const Threads& threads, const Body& body) {
  threads.run(
      threads.count,
      [](int64_t begin, int64_t end, void* context) {
        for (int64_t lane = begin; lane < end; ++lane) (*static_cast<const Body*>(context))(static_cast<int>(lane));
      },
      const_cast<Body*>(&body));
}

// body(lane, item) for each item. Lanes take items as they get free, so results may not depend on the lane.
template <class Body>
void for_items(const Threads& threads, int64_t items, const Body& body) {
  if (items == 1) return body(0, int64_t{0});  // waking the others takes longer than many an item
  std::atomic<int64_t> next{0};
  for_lanes(threads, [&](int lane) {
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) body(lane, item);
  });
}

}  // namespace twell
