"""A discrete-event simulation of the training loop: collector, buffer and loop, with given speeds.

Rules, as in recipes/grpo/{rollout,buffer,train}.py:

    window     with the engines at weights v, P groups are drawn for each of the steps v .. v + max_age, and no more
    a group    its G rollouts start together on one engine, chosen by the prompt; it is ready when all have a verdict
    a rollout  `turns` times: generate, then wait for the environment
    the loop   waits for the P groups of its step, trains, refits (engines pause and keep their sequences), moves the
               window by one step, and saves every `save_period` steps

Speeds: an engine with n running sequences produces n tokens in an iteration of `decode_seconds(n)`; sequences beyond
`max_num_seqs` queue; the prefill of a prompt stops the engine for its duration. Times are simulated seconds. The same
loop and seed give the same steps.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

Draw = Callable[[Random], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """The loop to simulate: sizes, limits and speeds."""

    num_prompts: int  # groups of a step
    num_generations: int  # rollouts of a group
    max_age: int  # max_trajectory_age_steps; 0 is synchronous
    num_engines: int
    max_num_seqs: int  # sequences that run in one engine at once
    decode_seconds: Callable[[int], float]  # of one iteration with so many sequences
    prefill_seconds: float  # of one group's prompt, which its G rollouts share
    draw_tokens: Draw  # generated tokens of a rollout, all turns together
    turns: int
    draw_environment_seconds: Draw  # after each turn
    train_seconds: Callable[[float], float]  # of a step with so many generated tokens
    refit_seconds: float
    save_seconds: float = 0.0
    save_period: int = 0  # in steps; 0: never


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One training step, in simulated seconds."""

    seconds: float  # since the end of the step before
    waited: float  # seconds in which the loop waited for its groups
    trained: float  # seconds
    tokens: float  # generated for this step
    age: float  # mean number of weight versions between the start of a group and its use
    busy: float  # share of the step in which an engine had a rollout in flight, mean over engines


@dataclass(slots=True)
class _Rollout:
    group: _Group
    tokens_per_turn: float
    turns_left: int


@dataclass(slots=True)
class _Group:
    target: int
    version: int
    engine: _Engine
    left: int = 0
    tokens: float = 0.0


@dataclass(slots=True)
class _Engine:
    """The sequences of one engine. Each running sequence advances by one token per iteration."""

    running: list[tuple[float, int, _Rollout]] = field(default_factory=list)  # heap by the `produced` of their end
    waiting: deque[_Rollout] = field(default_factory=deque)
    produced: float = 0.0  # tokens per sequence since the start: the clock of `running`
    until: float = 0.0  # the time for which `produced` is valid; later than now while the engine is stopped
    alarm: int = 0  # number of the newest scheduled event; older events are ignored
    in_flight: int = 0  # rollouts of this engine that run or wait to run
    busy_since: float = 0.0
    busy: float = 0.0


class Simulation:
    """The simulation: a queue of events in order of time."""

    def __init__(self, loop: Loop, *, seed: int) -> None:
        self.loop = loop
        self._random = Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._engines = [_Engine() for _ in range(loop.num_engines)]
        self._position = 0
        self._assigned: Counter[int] = Counter()
        self._ready: dict[int, list[_Group]] = {}
        self._step = 0
        self._num_steps = 0
        self._waiting_since: float | None = 0.0
        self._last_end = 0.0
        self._last_busy = 0.0
        self.steps: list[SimulatedStep] = []

    def run(self, num_steps: int) -> list[SimulatedStep]:
        """Simulate `num_steps` steps and return them."""
        self._num_steps = num_steps
        self._fill()
        while len(self.steps) < num_steps:
            self._now, _, action = heapq.heappop(self._events)
            action()
        return self.steps

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._order), action))

    # -- collector and environments -----------------------------------------------------------------------------

    def _fill(self) -> None:
        for target in range(self._step, min(self._step + self.loop.max_age, self._num_steps - 1) + 1):
            while self._assigned[target] < self.loop.num_prompts:
                self._assigned[target] += 1
                self._launch(target)

    def _launch(self, target: int) -> None:
        engine = self._engines[self._position % len(self._engines)]
        self._position += 1
        group = _Group(target=target, version=self._step, engine=engine, left=self.loop.num_generations)
        self._advance(engine)
        engine.until += self.loop.prefill_seconds
        for _ in range(self.loop.num_generations):
            tokens = max(1.0, self.loop.draw_tokens(self._random))
            group.tokens += tokens
            if engine.in_flight == 0:
                engine.busy_since = self._now
            engine.in_flight += 1
            engine.waiting.append(_Rollout(group, tokens / self.loop.turns, self.loop.turns))
        self._schedule(engine)

    def _turn_done(self, rollout: _Rollout) -> None:
        rollout.turns_left -= 1
        self._leave(rollout.group.engine)
        seconds = self.loop.draw_environment_seconds(self._random)
        self._after(seconds, lambda: self._verdict(rollout))

    def _leave(self, engine: _Engine) -> None:
        engine.in_flight -= 1
        if engine.in_flight == 0:
            engine.busy += self._now - engine.busy_since

    def _verdict(self, rollout: _Rollout) -> None:
        group = rollout.group
        if rollout.turns_left:
            if group.engine.in_flight == 0:
                group.engine.busy_since = self._now
            group.engine.in_flight += 1
            self._advance(group.engine)
            group.engine.waiting.append(rollout)
            self._schedule(group.engine)
            return
        group.left -= 1
        if group.left == 0:
            self._ready.setdefault(group.target, []).append(group)
            self._try_to_train()

    # -- engines ------------------------------------------------------------------------------------------------

    def _advance(self, engine: _Engine) -> None:
        """Advance the engine's clock to now. While the engine is stopped, `until` lies ahead: nothing is produced."""
        if engine.until < self._now:
            if engine.running:
                engine.produced += (self._now - engine.until) / self.loop.decode_seconds(len(engine.running))
            engine.until = self._now

    def _schedule(self, engine: _Engine) -> None:
        """Start queued sequences and schedule the end of the next sequence; the engine's clock must be at now."""
        while engine.waiting and len(engine.running) < self.loop.max_num_seqs:
            rollout = engine.waiting.popleft()
            heapq.heappush(engine.running, (engine.produced + rollout.tokens_per_turn, next(self._order), rollout))
        engine.alarm += 1
        if engine.running:
            alarm = engine.alarm
            left = max(0.0, engine.running[0][0] - engine.produced)
            seconds = engine.until - self._now + left * self.loop.decode_seconds(len(engine.running))
            self._after(seconds, lambda: self._ring(engine, alarm))

    def _ring(self, engine: _Engine, alarm: int) -> None:
        if alarm != engine.alarm:
            return
        self._advance(engine)
        engine.produced = max(engine.produced, engine.running[0][0])  # despite rounding, at least one has ended
        while engine.running and engine.running[0][0] <= engine.produced:
            self._turn_done(heapq.heappop(engine.running)[2])
        self._schedule(engine)

    # -- the loop -----------------------------------------------------------------------------------------------

    def _try_to_train(self) -> None:
        groups = self._ready.get(self._step, [])
        if self._waiting_since is None or len(groups) < self.loop.num_prompts:
            return
        del self._ready[self._step]
        waited, self._waiting_since = self._now - self._waiting_since, None
        tokens = sum(group.tokens for group in groups)
        trained = self.loop.train_seconds(tokens)
        age = sum(self._step - group.version for group in groups) / len(groups)
        self._after(trained, lambda: self._push(waited, trained, tokens, age))

    def _push(self, waited: float, trained: float, tokens: float, age: float) -> None:
        for engine in self._engines:
            self._advance(engine)
            engine.until += self.loop.refit_seconds
            self._schedule(engine)
        self._after(self.loop.refit_seconds, lambda: self._end_step(waited, trained, tokens, age))

    def _end_step(self, waited: float, trained: float, tokens: float, age: float) -> None:
        self._step += 1
        self._fill()
        is_due = self.loop.save_period > 0 and self._step % self.loop.save_period == 0
        self._after(self.loop.save_seconds if is_due else 0.0, lambda: self._record(waited, trained, tokens, age))

    def _record(self, waited: float, trained: float, tokens: float, age: float) -> None:
        seconds = self._now - self._last_end
        busy = sum(
            engine.busy + (self._now - engine.busy_since if engine.in_flight else 0.0) for engine in self._engines
        )
        share = (busy - self._last_busy) / (seconds * len(self._engines))
        self.steps.append(
            SimulatedStep(seconds=seconds, waited=waited, trained=trained, tokens=tokens, age=age, busy=share)
        )
        self._last_end, self._last_busy, self._waiting_since = self._now, busy, self._now
        self._try_to_train()


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The mean of the simulated steps after the pipeline has filled."""

    step_seconds: float
    policy_busy: float  # share of the time in which the policy trains
    policy_waits: float  # share of the time in which the loop waits for rollouts
    engines_busy: float  # share of the time in which an engine has a rollout in flight, mean over engines
    tokens_per_step: float  # generated
    age: float  # mean trajectory age


def forecast(loop: Loop, *, seed: int, num_steps: int = 12, warmup: int = 4) -> Forecast:
    """Simulate, and average the steps between the first ones, which fill the pipeline, and the last, which drain it."""
    steps = Simulation(loop, seed=seed).run(warmup + num_steps + loop.max_age)[warmup : warmup + num_steps]
    seconds = sum(step.seconds for step in steps)
    return Forecast(
        step_seconds=seconds / len(steps),
        policy_busy=sum(step.trained for step in steps) / seconds,
        policy_waits=sum(step.waited for step in steps) / seconds,
        engines_busy=sum(step.busy * step.seconds for step in steps) / seconds,
        tokens_per_step=sum(step.tokens for step in steps) / len(steps),
        age=sum(step.age for step in steps) / len(steps),
    )
