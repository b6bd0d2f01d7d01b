"""Times the parts of one microbatch's passes: embedding, each layer, head with loss.

One backbone runs forward and backward, and a clock is read wherever the hidden states or their
gradients pass from one part to the next. Differences of whole passes would be too noisy for the
time of one layer. On CUDA the clocks are events in the stream, so they do not synchronise with the
host.
"""

import time
from dataclasses import dataclass

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from kimi_pretrain.config import Config
from kimi_pretrain.engine.backbone import Backbone
from kimi_pretrain.engine.microbatch import Microbatch
from kimi_pretrain.engine.packed_attention import PackedRows


@dataclass(frozen=True)
class PartSeconds:
    """Forward and backward seconds of a part of one microbatch's passes."""

    forward: float
    backward: float


class PassTimer:
    """Timer that runs one microbatch through a single-stage backbone, as the schedule does.

    Args:
        backbone: the backbone to time.
        document_tokens: length of the documents in a row; the last document of a row may be
            shorter.
    """

    def __init__(self, backbone: Backbone, document_tokens: int):
        self.backbone = backbone
        self._device = backbone.mesh.device
        self._batch = random_microbatch(backbone.config, self._device, document_tokens)
        self._marks: list[_Mark] = []
        self._handles: list[RemovableHandle] = []
        (self._model,), (self._chunk,) = backbone.models, backbone.chunks
        for part in (self._chunk.embedding, *self._chunk.decoder.layers):
            part.register_forward_hook(self._passed)

    def run(self) -> list[PartSeconds]:
        """Run both passes once; return times of the embedding, each layer, the head with loss."""
        for model in self.backbone.models:
            model.train()
        scale = self.backbone.engine.moe_grad_scale_func
        assert scale is not None
        # The schedule sets this too; otherwise a default of another shape stays for the process.
        MoEAuxLossAutoScaler.set_loss_scale(scale())
        self._marks = [self._mark()]
        losses = self.backbone.forward(self._batch, self._model, self._batch.labels)
        loss = (losses * self._batch.loss_mask).sum()
        self._marks.append(self._mark())
        count = len(self._marks) - 1
        loss.backward()
        if not self.backbone.trainable:  # the embedding then has no backward work
            self._marks.append(self._marks[-1])
        self._marks.append(self._mark())
        self.backbone.take_max_logits()
        while self._handles:
            self._handles.pop().remove()
        return self._seconds(count)

    def close(self) -> None:
        """Release the model by another forward pass without a graph.

        Megatron-Core's token dispatchers keep the tensors of their last call. With its graph, they
        would keep the whole model and its process groups alive.
        """
        with torch.no_grad():
            self.backbone.forward(self._batch, self._model, self._batch.labels)
        self._marks = []

    def _seconds(self, count: int) -> list[PartSeconds]:
        marks, self._marks = self._marks, []
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        forward = [marks[n].until(marks[n + 1]) for n in range(count)]
        # After the last forward mark come the marks of the backward pass, starting at the head.
        backward = [marks[n].until(marks[n + 1]) for n in range(count, 2 * count)]
        return [PartSeconds(*pair) for pair in zip(forward, reversed(backward), strict=True)]

    def _passed(self, part, inputs, output) -> None:
        hidden: Tensor = output if isinstance(output, Tensor) else output[0]
        self._marks.append(self._mark())
        if hidden.requires_grad:
            self._handles.append(hidden.register_hook(self._came_back))

    def _came_back(self, gradient: Tensor) -> None:
        self._marks.append(self._mark())

    def _mark(self) -> "_Mark":
        return _Mark(self._device)


class _Mark:
    """A point in time: of the host's clock on a CPU, of the stream on CUDA."""

    def __init__(self, device: torch.device):
        self.event, self.seconds = None, 0.0
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()
        else:
            self.seconds = time.perf_counter()

    def until(self, later: "_Mark") -> float:
        if self.event is None or later.event is None:
            return later.seconds - self.seconds
        return self.event.elapsed_time(later.event) / 1e3


def random_microbatch(config: Config, device: torch.device, document_tokens: int) -> Microbatch:
    """Return a microbatch of random tokens without media, in which all losses count.

    Args:
        config: configuration of the run.
        device: device of the microbatch.
        document_tokens: see `PassTimer`.
    """
    seq_len, rows = config.data.seq_len, config.train.rows_per_microbatch
    borders = [
        row * seq_len + start for row in range(rows) for start in range(0, seq_len, document_tokens)
    ]
    borders.append(rows * seq_len)
    packed = PackedRows.of(borders, [True] * (len(borders) - 1), device)
    generator, shape = torch.Generator().manual_seed(0), (1, rows * seq_len)
    vocabulary = config.model.language.vocab_size
    tokens, labels = (
        torch.randint(vocabulary, shape, generator=generator).to(device) for _ in range(2)
    )
    none = torch.zeros(shape, dtype=torch.bool, device=device)
    return Microbatch(packed, none, tokens=tokens, labels=labels, loss_mask=~none)
