"""What a batch does with scheduler steps, as a dict of lists and a list of names."""

from dataclasses import dataclass, field


@dataclass
class Request:
    """One known request; blocks are None where it was preempted."""

    prefill: int
    computed: int
    scheduled: int
    blocks: list | None
    handle: int | None = None

    def leave(self):
        self.computed, self.scheduled = self.computed + self.scheduled, 0


@dataclass
class Start:
    """One entry of `new` or `resumed`."""

    prefill: int
    computed: int
    scheduled: int
    blocks: list


@dataclass
class GoOn:
    """One entry of `running`; computed is None where the batch counts by itself."""

    scheduled: int
    computed: int | None
    blocks: list


@dataclass
class Decision:
    """A scheduler step by names."""

    running: dict = field(default_factory=dict)
    new: dict = field(default_factory=dict)
    resumed: dict = field(default_factory=dict)
    finished: list = field(default_factory=list)
    preempted: list = field(default_factory=list)


class Model:
    """Who is known, and who stands where."""

    def __init__(self):
        self.known, self.order = {}, []
        self.committed = {}  # handle -> where it stood in the step committed last

    def take(self, decision):
        """Take a step, in the order of its lists: who goes, who comes, holes, blocks."""
        for name in [*decision.finished, *decision.new]:
            self._vacate(name)
            self.known.pop(name, None)
        for name in decision.preempted:
            if name in self.known:
                self._vacate(name)
                self.known[name].blocks = None
        for name in list(self.order):
            if name is not None and name not in decision.running and name not in decision.resumed:
                self._vacate(name)
        for name, entry in decision.running.items():
            one = self.known[name]
            one.computed = one.computed + one.scheduled if entry.computed is None else entry.computed
            one.scheduled = entry.scheduled
            one.blocks = [[*held, *more] for held, more in zip(one.blocks, entry.blocks, strict=True)]
        for name, entry in [*decision.new.items(), *decision.resumed.items()]:
            handle = self.known[name].handle if name in self.known else None
            blocks = [list(ids) for ids in entry.blocks]
            self.known[name] = Request(entry.prefill, entry.computed, entry.scheduled, blocks, handle)
        for name in [*decision.new, *decision.resumed, *decision.running]:
            if name not in self.order:
                self._enter(name)
        self._condense()

    def commit(self):
        self.committed = {self.known[name].handle: place for place, name in enumerate(self.order)}

    def remove(self, name):
        """Forget a request, and close its hole."""
        self._vacate(name)
        del self.known[name]
        self._condense()

    def swap(self, first, second):
        self.order[first], self.order[second] = self.order[second], self.order[first]

    def rest(self):
        """All leave the batch, as for a dummy step with rows in batch order."""
        for name in list(self.order):
            self._vacate(name)
        self.order.clear()

    def _vacate(self, name):
        if name in self.order:
            self.order[self.order.index(name)] = None
            self.known[name].leave()

    def _enter(self, name):
        if None in self.order:
            self.order[self.order.index(None)] = name
        else:
            self.order.append(name)

    def _condense(self):
        while None in self.order:
            last = self.order.pop()
            if last is not None:
                self.order[self.order.index(None)] = last
