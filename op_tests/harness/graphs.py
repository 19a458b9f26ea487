"""CUDA graphs: capture once, replay with other inputs in the same buffers."""

from collections.abc import Callable

import torch


def replay_in_graph(run: Callable[[], object], *, change: Callable[[], None] | None = None) -> torch.cuda.CUDAGraph:
    """Captures `run()` after a warm-up, lets `change()` alter the inputs in place, replays once, and returns the graph.

    Capture fails on any host synchronisation, so this is also the proof that there is none.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    if change is not None:
        change()
    graph.replay()
    torch.cuda.synchronize()
    return graph
