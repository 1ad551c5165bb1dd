// Launches captured into a CUDA graph and timed together, for the check programs' time modes.
#pragma once

#include <functional>

#include "tests/check.cuh"

namespace checks {

// `count` launches captured into a graph.
struct Graph {
  cudaStream_t stream;
  cudaGraphExec_t exec;
  cudaEvent_t begin, end;
  int count;
  std::vector<double> us;  // of one launch

  Graph(int launches, const std::function<void(int, cudaStream_t)>& launch) : count(launches) {
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < count; ++i) launch(i, stream);
    cudaGraph_t graph;
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
  }
  void replay(bool keep) {
    CHECK(cudaEventRecord(begin, stream));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaStreamSynchronize(stream));
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (keep) us.push_back(1000. * ms / count);
  }
  double median() {
    std::sort(us.begin(), us.end());
    return us[us.size() / 2];
  }
  void release() {
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaStreamDestroy(stream));
  }
};

}  // namespace checks
