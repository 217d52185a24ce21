"""Captured graphs: replay, task groups and the order of their updates, and what a capture forbids."""

import pytest
import torch

pytestmark = [pytest.mark.long, pytest.mark.emulated_npu]


def captured(work):
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, stream=torch.npu.Stream()):
        result = work()
    return graph, result


def test_replay_reads_persistent_inputs():
    x = torch.arange(4.0, device="npu")
    w = torch.ones(4, 4, device="npu")
    graph, y = captured(lambda: torch.softmax((x * 2) @ w, -1) + x.cumsum(0))
    for start in (1.0, 5.0):
        x.copy_(torch.arange(4.0) + start)
        graph.replay()
        assert torch.equal(y.cpu(), torch.softmax((x.cpu() * 2) @ w.cpu(), -1) + x.cpu().cumsum(0))


def test_npu_operators_and_out_are_recorded():
    import torch_npu

    x, gain, out = torch.ones(2, 64, device="npu"), torch.ones(64, device="npu"), torch.zeros(2, 64, device="npu")
    graph, _ = captured(lambda: torch.mul(torch_npu.npu_rms_norm(x, gain, 1e-6)[0], 3, out=out))
    x.copy_(torch.randn(2, 64))
    graph.replay()
    wanted = x.cpu() * torch.rsqrt(x.cpu().square().mean(-1, keepdim=True) + 1e-6) * 3
    assert torch.allclose(out.cpu(), wanted, rtol=1e-6)


def test_copies_and_fills_are_recorded():
    x, y = torch.ones(4, device="npu"), torch.zeros(4, device="npu")
    graph, _ = captured(lambda: y.copy_(x))
    x.fill_(7)
    graph.replay()
    assert y.tolist() == [7] * 4


def test_host_reads_are_refused_during_capture():
    x = torch.ones(4, device="npu")
    for read in (lambda: x.sum().item(), lambda: x.cpu(), lambda: torch.nonzero(x), lambda: torch.npu.synchronize()):
        with pytest.raises(RuntimeError, match="during graph capture"):
            captured(read)
        torch.npu.synchronize()


def test_side_streams_are_captured_too():
    """Their tensors must live as long as the graph does: torch_npu asks the runtime whether the stream is captured."""
    x, side = torch.ones(1 << 20, device="npu"), torch.npu.Stream()

    def forked():
        main = torch.npu.current_stream()
        side.wait_stream(main)
        with torch.npu.stream(side):
            y = x * 2
        main.wait_stream(side)
        return y + 1

    graph, out = captured(forked)
    torch.npu.empty_cache()
    x.fill_(5)
    graph.replay()
    assert out[:2].tolist() == [11, 11]


def test_freed_memory_is_noticed_at_replay():
    held = [torch.ones(64 << 20, dtype=torch.uint8, device="npu")]
    out = torch.zeros(4, dtype=torch.uint8, device="npu")
    graph, _ = captured(lambda: out.copy_(held[0][:4]))
    held.clear()
    torch.npu.empty_cache()
    with pytest.raises(RuntimeError, match="use after free"):
        graph.replay()


class Grouped:
    """y = x * factor, where the factor is a parameter of a task group, as the length of a sequence is of attention."""

    def __init__(self):
        self.x, self.y = torch.ones(4, device="npu"), torch.zeros(4, device="npu")
        self.graph, self.update_stream = torch.npu.NPUGraph(), torch.npu.Stream()
        with torch.npu.graph(self.graph, stream=torch.npu.Stream()):
            stream = torch.npu.current_stream()
            self.event = torch.npu.ExternalEvent()
            self.event.wait(stream)
            self.event.reset(stream)
            torch.npu.graph_task_group_begin(stream)
            self.operation(1.0)
            self.handle = torch.npu.graph_task_group_end(stream)

    def operation(self, epsilon):
        import torch_npu

        self.y.copy_(torch_npu.npu_rms_norm(self.x, torch.ones(4, device="npu"), epsilon)[0])

    def update(self, epsilon, record=True):
        with torch.npu.stream(self.update_stream):
            torch.npu.graph_task_update_begin(self.update_stream, self.handle)
            self.operation(epsilon)
            torch.npu.graph_task_update_end(self.update_stream)
            if record:
                self.event.record(self.update_stream)


def test_replay_takes_updated_parameters():
    grouped = Grouped()
    for epsilon in (3.0, 8.0):
        grouped.graph.replay()
        grouped.update(epsilon)
        assert grouped.y.tolist() == pytest.approx([(1 + epsilon) ** -0.5] * 4)


def test_replay_before_update_is_noticed():
    grouped = Grouped()
    grouped.graph.replay()
    with pytest.raises(RuntimeError, match="replay before update"):
        grouped.y.tolist()
    with pytest.raises(RuntimeError, match="replay before update"):
        torch.npu.synchronize()
    with pytest.raises(RuntimeError, match="replay before update"):
        grouped.x.add_(1)
    grouped.update(3.0, record=False)
    with pytest.raises(RuntimeError, match="replay before update"):
        grouped.y.tolist()
    grouped.event.record(grouped.update_stream)
    assert grouped.y.tolist() == pytest.approx([0.5] * 4)


def test_an_update_runs_nothing():
    """In-place and out= operators change the group, not the memory."""
    for operation in (lambda y, v: y.add_(v), lambda y, v: torch.add(y, v, out=y)):
        y, graph, stream = torch.zeros(2, device="npu"), torch.npu.NPUGraph(), torch.npu.Stream()
        with torch.npu.graph(graph, stream=torch.npu.Stream()):
            current = torch.npu.current_stream()
            torch.npu.graph_task_group_begin(current)
            operation(y, 1)
            handle = torch.npu.graph_task_group_end(current)
        y.zero_()
        torch.npu.graph_task_update_begin(stream, handle)
        operation(y, 10)
        torch.npu.graph_task_update_end(stream)
        assert y.tolist() == [0, 0]
        graph.replay()
        assert y.tolist() == [10, 10]


def test_random_numbers_in_a_graph():
    graph, x = captured(lambda: torch.rand(1000, device="npu"))
    graph.replay()
    first = x.cpu()
    graph.replay()
    assert not torch.equal(first, x.cpu())
    assert 0.4 < float(x.mean()) < 0.6


def test_an_exception_in_a_group_ends_the_capture():
    graph = torch.npu.NPUGraph()
    with pytest.raises(RuntimeError), torch.npu.graph(graph, stream=torch.npu.Stream()):  # noqa: PT012
        torch.npu.graph_task_group_begin(torch.npu.current_stream())
        raise RuntimeError("in a group")
    torch.npu.synchronize()
    again, out = captured(lambda: torch.ones(2, device="npu") * 2)
    again.replay()
    assert out.tolist() == [2, 2]


def test_a_group_must_be_closed():
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, stream=torch.npu.Stream()):
        stream = torch.npu.current_stream()
        torch.npu.graph_task_group_begin(stream)
        with pytest.raises(RuntimeError, match="task groups do not nest"):
            torch.npu.graph_task_group_begin(stream)
        torch.npu.graph_task_group_end(stream)
