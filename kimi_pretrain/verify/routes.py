"""Records the experts that each token chose, by position in the global batch, and replays them.

If a token's last chosen and best rejected expert have the same score up to rounding, either choice
is correct. Two correct runs then differ by far more than rounding in that token. So the run to
verify records every choice with its margin, and the reference follows it only where the token is at
a tie in both runs. With equal routes, gradients agree up to rounding again, and a wrong route is
reported as a wrong route. (Megatron-Core's `RouterReplay` replays routes at the same point.)

Each router chooses twice: the experts for a token, by biased scores, and the experts that count in
the balance loss, by normalised scores without bias. So margins are relative to a token's largest
score.

Shape suffixes: N tokens of the global batch (padding included), T tokens of this rank's part of a
microbatch, E experts, K chosen experts.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kimi_pretrain.parallel.sequence import SequenceParts
from kimi_pretrain.verify.dep_compare import StepRoutes
from kimi_pretrain.verify.fault import Replaced

if TYPE_CHECKING:
    from kimi_pretrain.engine.backbone import BackboneResult
    from kimi_pretrain.engine.microbatch import Microbatch
    from kimi_pretrain.run import Run

FOLDER = "routes"
# (scores [T, E], K, expert groups, groups per token) -> (scores [T, K], experts [T, K])
TopK = Callable[..., tuple[Tensor, Tensor]]


def margins(scores_TE: Tensor, chosen_TK: Tensor) -> Tensor:
    """Return (lowest chosen score - highest other score) / largest score of each token, [T].

    A margin is negative if another expert scores higher, and NaN if the choice is missing or has
    the same expert twice.
    """
    experts_TK = chosen_TK.sort(1).values
    sound_T = (experts_TK[:, 0] >= 0) & (experts_TK.diff(dim=1) > 0).all(1)
    experts_TK = experts_TK.clamp(min=0)
    others_T = scores_TE.scatter(1, experts_TK, -torch.inf).amax(1)
    gap_T = (scores_TE.gather(1, experts_TK).amin(1) - others_T) / scores_TE.abs().amax(1)
    return gap_T.masked_fill(~sound_T, torch.nan)


def at_a_tie(scores_TE: Tensor, chosen_TK: Tensor, margins_T: Tensor, bound: float) -> Tensor:
    """Return which tokens may have chosen these experts by rounding alone, bool [T].

    Args:
        scores_TE: scores of this run.
        chosen_TK: choice of the other run.
        margins_T: margins of that choice by the other run's scores.
        bound: the largest margin that rounding explains.
    """
    return (margins_T >= 0) & (margins_T <= bound) & (margins(scores_TE, chosen_TK) >= -bound)


class RouteWatch:
    """Records the choices of one rank's routers in a step, and follows another run at ties.

    Args:
        run: run whose backbone executes the step.
        followed: router -> (experts int64 [N, K], margins [N]) of the run to follow, or None.
        bound: the largest margin that rounding explains.
    """

    def __init__(self, run: "Run", followed: dict[str, tuple[Tensor, Tensor]] | None, bound: float):
        self._run, self._followed, self._bound = run, followed, bound
        self._where: list[tuple[Tensor, Tensor]] = []  # per microbatch: positions in N, not padding
        self._chosen: defaultdict[str, list[tuple[Tensor, Tensor, Tensor]]] = defaultdict(list)
        self._ties, self._wrong = set[int](), set[int]()
        self._first: str | None = None

    def attach(self, replaced: Replaced) -> None:
        """Hook into the routers for the backbone's next step."""
        backbone = self._run.backbone
        replaced.put(backbone, "train_step", partial(self._begin, backbone.train_step))
        for layer, router in backbone.routers():
            name = f"layer {layer}"
            replay = Replay(partial(self._route, name, router.router_replay))
            replaced.put(router, "router_replay", replay)
            balance = partial(self._balance, f"{name}, balance", router._apply_seq_aux_loss)
            replaced.put(router, "_apply_seq_aux_loss", balance)

    def write(self, folder: Path, step: int) -> None:
        """Write the choices of this rank's routers, for `read_routes`."""
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        columns = {
            f"{name}/{column}": torch.cat(parts).contiguous()
            for name, calls in self._chosen.items()
            for column, parts in zip(("tokens", "experts", "margins"), zip(*calls), strict=True)
        }
        save_file(columns, folder / FOLDER / f"step_{step}_rank_{self._run.mesh.rank}.safetensors")

    def report(self, step: int) -> StepRoutes:
        """Return the comparison of the choices with the followed run."""
        tokens = sum(int(real.sum()) for _, real in self._where)
        return StepRoutes(step, tokens, len(self._ties), len(self._wrong), self._first)

    def _begin(
        self, train_step: "Callable[[list[Microbatch], float], BackboneResult]",
        microbatches: "list[Microbatch]", aux_scale: float,
    ) -> "BackboneResult":  # fmt: skip
        mesh, config = self._run.mesh, self._run.config
        row = config.train.rows_per_microbatch * config.data.seq_len
        places = torch.from_numpy(SequenceParts(row, mesh.num_cp, mesh.num_tp).positions(mesh.part))
        first = mesh.replica * len(microbatches)
        self._where = [
            ((first + microbatch.number) * row + places, ~microbatch.padding[0].cpu())
            for microbatch in microbatches
        ]
        return train_step(microbatches, aux_scale)

    def _route(
        self, name: str, inner: Any, scores_TE: Tensor, k: int, groups: Any, take: Any, topk: TopK
    ) -> tuple[Tensor, Tensor]:
        if inner is not None:
            topk = partial(inner.get_replay_topk, default_compute_topk=topk)
        chosen_TK = self._settle(name, scores_TE.detach(), topk(scores_TE, k, groups, take)[1])
        return scores_TE.gather(1, chosen_TK), chosen_TK

    def _balance(
        self, name: str, apply: Callable[..., Tensor], probs: Tensor, scores_TE: Tensor,
        routing_map: Tensor, *args: Any, **options: Any,
    ) -> Tensor:  # fmt: skip
        k = self._run.config.model.language.experts_per_token
        own_TK = routing_map.int().topk(k, dim=1).indices
        chosen_TK = self._settle(name, scores_TE.detach(), own_TK)
        chosen_TE = torch.zeros_like(routing_map).scatter(1, chosen_TK, True)
        real_T1 = routing_map.any(1, keepdim=True)
        return apply(probs, scores_TE, chosen_TE & real_T1, *args, **options)

    def _settle(self, name: str, scores_TE: Tensor, chosen_TK: Tensor) -> Tensor:
        """Return the choices of a call's tokens; a reference adopts the followed choice at ties."""
        # One call per microbatch: Megatron-Core runs them in order and recomputes nothing.
        places_T, real_T = self._where[len(self._chosen[name])]
        scores_TE, own_TK = scores_TE.cpu(), chosen_TK.cpu()
        if self._followed is not None:
            assert name in self._followed, (name, "chose nothing in the run to follow")
            theirs_TK, margins_T = (column[places_T] for column in self._followed[name])
            differs_T = (theirs_TK.sort(1).values != own_TK.sort(1).values).any(1) & real_T
            tie_T = differs_T & at_a_tie(scores_TE, theirs_TK, margins_T, self._bound)
            self._ties.update(places_T[tie_T].tolist())
            wrong_T = differs_T & ~tie_T
            self._wrong.update(places_T[wrong_T].tolist())
            if self._first is None and wrong_T.any():
                at = int(wrong_T.nonzero()[0])
                row, token = divmod(int(places_T[at]), self._run.config.data.seq_len)
                theirs, own = (x_TK[at].sort().values.tolist() for x_TK in (theirs_TK, own_TK))
                self._first = (
                    f"row {row}, token {token}, {name}: experts {theirs}, the reference {own}"
                )
            if tie_T.any():
                own_TK = torch.where(tie_T[:, None], theirs_TK, own_TK)
                chosen_TK = own_TK.to(chosen_TK.device)
        found_T = margins(scores_TE, own_TK)
        kept = places_T[real_T], own_TK[real_T].short(), found_T[real_T].float()
        self._chosen[name].append(kept)
        return chosen_TK


class Replay:
    """Replaces the `RouterReplay` of a Megatron-Core router.

    Args:
        choose: (scores, K, expert groups, groups per token, the router's top-k) -> as `TopK`.
    """

    def __init__(self, choose: TopK):
        self._choose = choose

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: Any = None, group_topk: Any = None,
        default_compute_topk: Any = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the scores [T, K] and experts [T, K] of the tokens."""
        return self._choose(scores, topk, num_groups, group_topk, default_compute_topk)


def read_routes(folder: Path, step: int, tokens: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the choices of all ranks in a step: router -> (experts [N, K], margins [N]).

    Args:
        folder: folder that the ranks wrote into.
        step: counted from 1.
        tokens: N; tokens that no rank wrote get expert -1 and margin NaN.
    """
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for file in sorted((folder / FOLDER).glob(f"step_{step}_rank_*.safetensors")):
        content = load_file(file)
        for name in {key.rpartition("/")[0] for key in content}:
            columns = ("tokens", "experts", "margins")
            places, experts, margin = (content[f"{name}/{column}"] for column in columns)
            if name not in found:
                nothing = torch.full((tokens, experts.shape[1]), -1, dtype=torch.int64)
                found[name] = nothing, torch.full((tokens,), torch.nan)
            found[name][0][places] = experts.long()
            found[name][1][places] = margin
    return found
