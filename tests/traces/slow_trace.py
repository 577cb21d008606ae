"""An obvious model of a trajectory, and random turns to feed it with."""

import numpy as np

from trl_support_replay.traces import (
    ArrayField,
    RoutedExperts,
    RoutesField,
    SupportField,
    SupportRows,
)

EOS = 2
VOCAB = 50
ROUTES = RoutesField(layers=(1, 2), top_k=2, num_experts=5)
SCORE = ArrayField("score", np.int16, (3,), fill=-7)
FIELDS = (SupportField(VOCAB), ROUTES, SCORE)


class SlowTrace:
    """One dictionary a token. Follows the rules by the letter, with no regard for cost."""

    def __init__(self, num_prompt):
        self.prompt = [{"route": None} for _ in range(num_prompt)]
        self.tokens = []
        self.turns = 0
        self.starts = []
        self.removed = None  # (position, token)

    def sampled(self, tokens):
        self.tokens += [{**token, "turn": self.turns, "kind": "sampled", "route": None} for token in tokens]
        self.turns += 1
        self.starts.append(len(self.tokens) - len(tokens))
        self.removed = None

    def observation(self, ids):
        self.tokens += [{"id": i, "kind": "observation", "route": None} for i in ids]

    def can_remove(self):
        last = self.tokens[-1] if self.tokens else {}
        return last.get("kind") == "sampled" and last["turn"] == self.turns - 1 and last["id"] == EOS

    def remove(self):
        self.removed = (len(self.tokens) - 1, self.tokens.pop())

    def restore(self):
        position, token = self.removed
        while len(self.tokens) > position:
            assert self.tokens.pop()["kind"] == "observation"
        self.tokens.append(token)
        self.removed = None

    def can_synthesize(self):
        last = [token for token in self.tokens if token.get("turn") == self.turns - 1]
        return self.turns and not self.removed and not (last and last[-1]["id"] == EOS)

    def synthetic(self):
        while self.tokens and self.tokens[-1]["kind"] == "observation" and len(self.tokens) > self.starts[-1]:
            self.tokens.pop()
        self.tokens.append({"id": EOS, "kind": "synthetic", "route": None})

    def truncate(self, n):
        del self.tokens[n:]
        self.starts = [start for start in self.starts if start < n]
        self.turns = len(self.starts)
        if self.removed and self.removed[0] >= n:
            self.removed = None

    @property
    def sequence(self):
        return self.prompt + self.tokens

    def num_routes(self):
        return sum(1 for token in self.sequence if token["route"] is not None)

    def check(self, trajectory):
        kinds = [token["kind"] for token in self.tokens]
        assert trajectory.completion_ids.tolist() == [token["id"] for token in self.tokens]
        assert trajectory.sampled.tolist() == [kind == "sampled" for kind in kinds]
        assert trajectory.loss_mask.tolist() == [kind != "observation" for kind in kinds]
        assert trajectory.has_synthetic_eos == ("synthetic" in kinds)
        expected = [token["logprob"] for token in self.tokens if token["kind"] == "sampled"]
        assert trajectory.logprobs[trajectory.sampled].tolist() == expected
        assert trajectory.support.to_lists() == [token.get("row", []) for token in self.tokens]
        assert trajectory.side["score"].tolist() == [token.get("score", [-7] * 3) for token in self.tokens]
        routes = trajectory.routed_experts
        assert routes.captured.tolist() == [token["route"] is not None for token in self.sequence]
        assert [routes.experts[i].tolist() for i in np.flatnonzero(routes.captured)] == [
            token["route"] for token in self.sequence if token["route"] is not None
        ]
        trajectory.validate(vocab_size=VOCAB)
        for turn, step in enumerate(trajectory.steps()):
            block = [t for t in self.tokens if t.get("turn") == turn]
            if turn == self.turns - 1:
                block += [t for t in self.tokens if t["kind"] == "synthetic"]
            assert step.completion_ids.tolist() == [token["id"] for token in block]
            assert step.support.to_lists() == [token.get("row", []) for token in block]
            assert step.side["score"].tolist() == [token.get("score", [-7] * 3) for token in block]
            start = self.starts[turn]
            assert step.prompt_ids[len(self.prompt) :].tolist() == [token["id"] for token in self.tokens[:start]]
            assert step.routed_experts == routes[: len(self.prompt) + start + len(block)]
            assert len(step.steps()) == 1 and step.steps()[0] == step
        assert len(trajectory.steps()) == self.turns


class Turns:
    """Random data that no two tokens share, so that a row at the wrong token cannot go unseen."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.count = 0

    def turn(self, size, ends):
        tokens = []
        for i in range(size):
            self.count += 1
            token = EOS if ends and i == size - 1 else int(self.rng.integers(3, VOCAB))
            others = self.rng.choice(VOCAB, size=self.rng.integers(0, 5), replace=False).tolist()
            tokens.append(
                {
                    "id": token,
                    "logprob": -float(self.count),
                    "row": [token, *(other for other in others if other != token)],
                    "score": [self.count, 0, -self.count],
                }
            )
        return tokens

    def routes(self, size):
        return [[self.rng.choice(5, 2, replace=False).tolist() for _ in range(2)] for _ in range(size)]


def append(trace, tokens):
    trace.append_sampled(
        [token["id"] for token in tokens],
        [token["logprob"] for token in tokens],
        support=SupportRows.from_ragged([token["row"] for token in tokens]),
        score=np.array([token["score"] for token in tokens], dtype=np.int16).reshape(-1, 3),
    )


def as_routes(rows):
    return RoutedExperts(np.array(rows, dtype=np.int64).reshape(-1, 2, 2), num_experts=5, layers=(1, 2))
