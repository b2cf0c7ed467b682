"""A state machine over a whole engine's life, and the same life without Hypothesis.

Hypothesis draws (and shrinks) the actions and a seed each; the details come from the seed.
"""

from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from .life_engine import Life

ACTIONS = {"step": 20, "arrive": 2, "preempt": 2, "abort": 1, "start_anew": 1, "dummy": 2}

randoms = st.integers(0, 2**32 - 1).map(Random)


class EngineMachine(RuleBasedStateMachine):
    def __init__(self, setup, backend):
        super().__init__()
        self.setup, self.backend = setup, backend

    @initialize(random=randoms)
    def build(self, random):
        self.life = Life(self.setup, self.backend, random)

    @rule(random=randoms)
    def arrive(self, random):
        for _ in range(random.randint(1, 3)):
            self.life.arrive(random)

    @rule(random=randoms, num_steps=st.integers(1, 4))
    def steps(self, random, num_steps):
        for _ in range(num_steps):
            self.life.step(random)

    @rule(random=randoms)
    def preempt(self, random):
        self.life.preempt(random)

    @rule(random=randoms)
    def abort(self, random):
        self.life.abort(random)

    @rule(random=randoms)
    def start_anew(self, random):
        self.life.start_anew(random)

    @rule(random=randoms)
    def dummy(self, random):
        self.life.dummy(random)

    def teardown(self):
        if hasattr(self, "life"):
            self.life.finish(Random(0))


def live(setup, backend, seed, num_actions):
    """A long life drawn from one seed."""
    random = Random(seed)
    life = Life(setup, backend, random)
    for _ in range(num_actions):
        action = random.choices(list(ACTIONS), ACTIONS.values())[0]
        getattr(life, action)(random)
    life.finish(random)
    return life
