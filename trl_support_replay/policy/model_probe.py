"""Try a model on a few tokens before it trains: scores that are replayed have to be those of its own logits.

Two things are compared. With training mode on, the model must return the logits that it returns in evaluation mode, and
draw no random numbers. And the scores that replay computes from hidden states and head must be the `log_softmax` of the
model's own logits; they are not where a model divides the states before its head, adds a layer there, or cuts or masks
its logits.

A probe leaves the model as it was: training flags, buffers, random state, gradients. On a sharded model it is a
collective call.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..routing.discovery import configs, reshard
from ..scoring.precision import full_precision
from ..traces.columns import Trace
from ..traces.support import SupportRows
from .noise import RandomDraws, noise_settings

_NUM_ROWS, _LENGTH = 4, 6
_EDGES = (1e-6, 1 - 1e-6)
_FLOAT32_TOLERANCE = 1e-4  # of the largest logit; two orders of summation differ by about 1e-6 of it


class UnreplayableModelError(ValueError):
    """A model whose scores cannot be replayed exactly."""


@dataclass(frozen=True)
class Probe:
    """What a model answered to a few tokens in evaluation mode.

    Attributes:
        input_ids: `[4, 6]` int64.
        logits: `[4, 6, V]` float32.
        num_rows: rows of the output head; `None` where the model does not call one.
        num_masked: ids without a logit: NaN, or next to the least value of the data type.
        tolerance: difference of two logits, or of two log-probs, that is rounding.
        every_token: whether that holds for each token, or for the median one.
    """

    input_ids: torch.Tensor
    logits: torch.Tensor
    num_rows: int | None
    num_masked: int
    tolerance: float
    every_token: bool

    @classmethod
    def run(cls, model: nn.Module) -> Probe:
        """Run `model` once, in evaluation mode.

        Where the head computes in float32, no token may differ by more than 1e-4 of the largest logit. In half
        precision each step between head and logit rounds by up to `eps / 2` of the logit, so the median token may
        differ by that much of the largest one. It is the median since kernels that add in any order can tip a near tie
        between two experts, and that moves the logits of a few tokens by more than rounding.
        """
        ids = _probe_ids(model)
        seen: list[torch.Tensor] = []
        head = causal_model(model).get_output_embeddings()
        with _left_alone(model), contextlib.ExitStack() as stack:
            if isinstance(head, nn.Module):
                stack.callback(head.register_forward_hook(lambda module, args, output: seen.append(output)).remove)
            model.eval()  # on a line of its own: DeepSpeed's engine returns None
            logits = _forward(model, ids)
        made = seen[-1] if seen and isinstance(seen[-1], torch.Tensor) else None
        eps = torch.finfo((logits if made is None else made).dtype).eps
        float32 = eps < _FLOAT32_TOLERANCE
        usual = logits > torch.finfo(logits.dtype).min / 2
        largest = max(1.0, float(logits.where(usual, 0.0).abs().max()))
        return cls(
            input_ids=ids,
            logits=logits.float(),
            num_rows=None if made is None else made.shape[-1],
            num_masked=int((~usual).flatten(0, -2).any(0).sum()),
            tolerance=(_FLOAT32_TOLERANCE if float32 else eps / 2) * largest,
            every_token=float32,
        )

    # ------------------------------------------------------------------------------------------------- training mode

    def check_training_mode(self, model: nn.Module) -> None:
        """Raise unless training mode gives the logits of evaluation mode, without random numbers.

        Raises:
            UnreplayableModelError: naming the module that draws numbers, if any does, and settings that speak of noise.
        """
        family = _family(causal_model(model))
        settings = _settings(noise_settings(model))
        for edge in _EDGES:
            with _left_alone(model), RandomDraws(edge) as draws:
                model.train()
                logits = _forward(model, self.input_ids).float()
            if draws.drawn_by:
                module, operator = draws.drawn_by[0]
                raise UnreplayableModelError(
                    f"{family} draws random numbers in training mode ({operator} in {_name(module, model)}), and the "
                    f"engine samples without noise. {settings}"
                )
            # The largest difference of each token's logits.
            difference = self._difference(_gap(logits, self.logits).amax(-1))
            if not difference <= self.tolerance:
                raise UnreplayableModelError(
                    f"{family} computes other logits in training mode than in evaluation mode, in which the engine "
                    f"samples: they differ by {difference:.3g}, and {self.tolerance:.1g} is rounding. {settings}"
                )

    # ---------------------------------------------------------------------------------------------------------- head

    @property
    def traces(self) -> list[Trace]:
        """The probe as two recorded completions. The support of each token is the set of all its tokens."""
        ids = self.input_ids.cpu().numpy().astype(np.int32)
        support = np.unique(ids).tolist()
        length = _LENGTH - 1
        return [
            Trace(
                prompt_ids=row[:1],
                completion_ids=row[1:],
                loss_mask=np.ones(length, bool),
                sampling_logprobs=np.full(length, -1.0, np.float32),
                supports=SupportRows.from_ragged([support] * length),
            )
            for row in ids
        ]

    def check_scores(
        self,
        model: nn.Module,
        score: Callable[[list[Trace]], Iterable[torch.Tensor]],
        temperature: float = 1.0,
    ) -> None:
        """Raise unless replayed scores are those of the model's own logits.

        Args:
            model: what was probed.
            score: log-probs of all tokens of some traces, first over the supports, then over the vocabulary, in any
                shape that keeps their order.
            temperature: that `score` scores at.

        Raises:
            UnreplayableModelError: naming the model's class and the largest difference, or the two sizes of vocabulary.
        """
        causal, vocab_size = causal_model(model), self.logits.shape[-1]
        family = _family(causal)
        if causal.base_model is causal:
            raise UnreplayableModelError(
                f"{family} names no backbone (base_model_prefix={causal.base_model_prefix!r}), whose hidden states are "
                "what is scored, so this model cannot be replayed."
            )
        if self.num_rows not in (None, vocab_size):
            raise UnreplayableModelError(
                f"{family} returns logits for {vocab_size} ids, and its output head has {self.num_rows} rows: it cuts "
                "its vocabulary after the head. Supports are scored with the head's own rows, so this model cannot be "
                "replayed."
            )
        if self.num_masked:
            raise UnreplayableModelError(
                f"{family} masks {self.num_masked} of {vocab_size} ids after its head (or they are NaN). Scores over "
                "the vocabulary would count them, so this model cannot be replayed."
            )
        with _left_alone(model), full_precision(self.input_ids.device):
            model.eval()
            replayed = [scores.float().reshape(-1) for scores in score(self.traces)]
        for replayed_scores, own in zip(replayed, self._own_scores(temperature), strict=True):
            difference = self._difference(_gap(replayed_scores.to(own.device), own))
            if not difference <= self.tolerance / temperature:
                raise UnreplayableModelError(
                    f"The scores of {family} cannot be replayed: computed from hidden states and output head, they "
                    f"differ by {difference:.3g} nats from log_softmax of the model's own logits, and "
                    f"{self.tolerance / temperature:.1g} is rounding. The model does something between its last hidden "
                    "state and its logits that is not known here."
                )

    def _difference(self, gaps: torch.Tensor) -> float:
        return float(gaps.max() if self.every_token else gaps.median())

    def _own_scores(self, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of all tokens by the model's own logits: over the supports, and over the vocabulary."""
        logits, sampled = self.logits[:, :-1] / temperature, self.input_ids[:, 1:, None]
        chosen = logits.gather(2, sampled)[..., 0]
        over_support = logits[..., self.input_ids.unique()].logsumexp(-1)
        return (chosen - over_support).reshape(-1), (chosen - logits.logsumexp(-1)).reshape(-1)


def _gap(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`|a - b|`: equal infinities do not differ, and NaN differs from everything."""
    return torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=float("inf"))


def _forward(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """`[4, 6, V]`, as the trainer calls the model, but for the scores."""
    with full_precision(ids.device), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")  # checkpointed layers
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits


def causal_model(model: Any) -> Any:
    """The transformers model inside DDP, FSDP1, torch.compile or PEFT. One with adapters of transformers is its own."""
    while isinstance(inner := getattr(model, "module", getattr(model, "_orig_mod", None)), nn.Module):
        model = inner
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def _family(model: nn.Module) -> str:
    """Name of a model's class; FSDP2 gives each model a class of its own."""
    return next(kind.__name__ for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def _probe_ids(model: nn.Module) -> torch.Tensor:
    """`[4, 6]` ids spread over the vocabulary. Special ones are left out: an image's placeholder wants an image."""
    settings = [item for config in configs(model) for item in vars(config).items()]
    special = {
        i
        for name, value in settings
        if "token" in name
        for i in (value if isinstance(value, list | tuple) else [value])
        if isinstance(i, int)
    }
    vocab_size = causal_model(model).config.get_text_config().vocab_size
    ordinary = np.setdiff1d(np.arange(vocab_size), list(special))
    ids = ordinary[np.linspace(0, len(ordinary) - 1, _NUM_ROWS * _LENGTH + 2).astype(int)[1:-1]]
    device = next(p.device for p in model.parameters() if not p.is_meta)
    return torch.from_numpy(np.random.default_rng(0).permutation(ids)).view(_NUM_ROWS, _LENGTH).to(device)


@contextlib.contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    """Without gradients; what a forward may change is put back."""
    training = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_meta]
    devices = {buffer.device.index for buffer, _ in buffers} | {p.device.index for p in model.parameters()}
    kind = next((p.device.type for p in model.parameters() if p.device.type not in ("cpu", "meta")), None)
    fork = torch.random.fork_rng(devices=sorted(i for i in devices if i is not None), device_type=kind or "cuda")
    with torch.no_grad(), fork:
        try:
            yield
        finally:
            for buffer, saved in buffers:
                buffer.copy_(saved)
            for module, mode in training.items():
                module.training = mode
            reshard(model)


def _name(module: nn.Module | None, model: nn.Module) -> str:
    names = {id(m): name for name, m in model.named_modules()}
    return "its forward" if module is None else f"the {type(module).__name__} {names.get(id(module), '')}".rstrip()


def _settings(found: Mapping[str, float]) -> str:
    if not found:
        return "Its configuration names no setting of noise, so this model cannot be replayed."
    listed = ", ".join(f"{name}={value:g}" for name, value in found.items())
    remedy = "If one of these is the cause, set it to 0, for example with model_init_kwargs."
    return f"Its configuration has {listed}. {remedy}"
