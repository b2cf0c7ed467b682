"""The model of an engine's life: what every token is, and what every slot of every block holds.

The content of a slot is the tag of the tokens up to its own: equal prefixes have equal content, and nothing
else has. A block of a recurrent state holds, at offset 0, the tag of the tokens after which it is the state.
"""

NULL = 0
STALE = -1  # content of what was written for tokens that are not to be


class Tags:
    """One number for each sequence of tokens."""

    def __init__(self):
        self.known = {}

    def chain(self, tokens, tag=0):
        """The tags of the sequences that end with each of `tokens`, after the sequence of `tag`."""
        tags = []
        for token in tokens:
            tag = self.known.setdefault((tag, token), len(self.known) + 1)
            tags.append(tag)
        return tags


class Request:
    """One request, with what is true of it and what the host believes."""

    def __init__(self, name, tokens, limit, tags):
        self.name, self.limit = name, limit
        self.all_tags = tags
        self.tokens, self.tags = list(tokens), tags.chain(tokens)
        self.handle = None
        self.is_known = False  # to the batch
        self.num_prefill = 0  # tokens that it had when it started, or started again
        self.restart()

    def restart(self):
        """Nothing is in the cache, and no blocks are held."""
        self.computed = 0  # what the device knows
        self.believed = 0  # what the batch will believe, where it is not told: at least as many
        self.drafts, self.draft_tags = [], []
        self.slots = {}  # (group, position) -> slot of every token that was ever written
        self.has_blocks = self.is_unsettled = False

    def draft(self, drafts):
        """Guess the next tokens."""
        self.drafts, self.draft_tags = drafts, self.all_tags.chain(drafts, self.tags[-1])

    def extend(self, tokens):
        """The next tokens, for good."""
        self.tags += self.all_tags.chain(tokens, self.tags[-1])
        self.tokens += tokens
        self.drafts, self.draft_tags = [], []

    def tag(self, position):
        """Content of the token at a position, be it a draft."""
        known = len(self.tags)
        assert 0 <= position < known + len(self.drafts), f"token {position} of {self.name} is not there"
        return self.tags[position] if position < known else self.draft_tags[position - known]


class Plan:
    """One request's share of a step."""

    def __init__(self, request, kind, scheduled, *, believed=0, is_told=True):
        self.request, self.kind, self.scheduled = request, kind, scheduled
        self.believed = believed  # tokens in the cache, as the scheduler tells the batch
        self.is_told = is_told  # False where the scheduler says nothing, and the batch goes on by itself
        self.blocks = None  # new ids, a list a group

    def cut_short(self, scheduled):
        """Fewer tokens after all, the last drafts first."""
        num_kept = scheduled - (self.scheduled - len(self.request.drafts))
        self.request.draft(self.request.drafts[: max(num_kept, 0)])
        self.scheduled = scheduled

    @property
    def end(self):
        """Tokens in the cache after the step."""
        return self.request.computed + self.scheduled


class Memory:
    """The content of all blocks; what a block held is gone when it is handed out."""

    def __init__(self):
        self.blocks = {}

    def wipe(self, block_ids):
        for block in block_ids:
            self.blocks.pop(block, None)

    def copy(self, source, target):
        self.blocks[target] = dict(self.blocks.get(source, {}))

    def write(self, group, block, offset, tag):
        assert block != NULL, "the null block is written"
        self.blocks.setdefault(block, {})[offset] = group, tag

    def read(self, group, block, offset):
        """The tag that lies there; None where there is nothing of this group."""
        found = self.blocks.get(block, {}).get(offset)
        return found[1] if found is not None and found[0] == group else None
