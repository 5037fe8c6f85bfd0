"""The one door to the device tier: open, grow, publish, close; pin and unpin; clear.

The life of a request's blocks:

    open ──► grow ──► (compute) ──► publish ──► grow ... ──► close
     │ lock the hit     │ own blocks    │ full blocks become the tree's   │ unlock, free the rest

Pure. What a plan in flight names stays as it is: its requests hold their blocks until its result is in, and a block
that is given up for another of the same content meanwhile is pinned.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from services.scheduler.kv.block_pool import REQUEST, TREE, BlockPool, OwnershipError
from services.scheduler.kv.node import Node
from services.scheduler.kv.radix import RadixTree
from services.scheduler.kv.sequence import CachedBlock, Match, Sequence
from shared import identity


@dataclass(frozen=True)
class KVStatistics:
    """Blocks now (`free + cached + locked == total`), and counters since the start.

    `cached`: in the tree and evictable. `locked`: held by a request, a lock in the tree or a copy in flight.
    """

    total: int
    free: int
    cached: int
    locked: int
    nodes: int
    inserted: int
    duplicates: int
    evicted: int


class KVManager:
    """Device-tier accounting for `blocks` blocks of `block_tokens` tokens; `key` makes the identities.

    All `tokens` are arrays of typecode "I"; all counts are tokens unless named blocks.
    """

    def __init__(self, blocks: int, block_tokens: int, key: bytes, *, prefix_cache: bool = True) -> None:
        self.block_tokens = block_tokens
        self.prefix_cache = prefix_cache
        self._key = key
        self._pool = BlockPool(blocks)
        self._tree = RadixTree(block_tokens, key, self._pool.pins)
        self._duplicates = 0

    @property
    def total(self) -> int:
        """Blocks of the pool."""
        return self._pool.total

    @property
    def available(self) -> int:
        """Blocks that `grow` can still hand out: empty ones and those it may evict."""
        return self._pool.free + self._tree.evictable

    def blocks_for(self, tokens: int) -> int:
        """Blocks that cover positions [0, tokens)."""
        return -(-tokens // self.block_tokens)

    # --- a request's life ---------------------------------------------------------------------------------------

    def match(self, root: bytes, tokens: "array[int]", limit_tokens: int, *, touch: bool = True) -> Match:
        """The cached prefix of `tokens`, at most `limit_tokens` long; changes no structure, locks nothing.

        Refreshes the recency of what it finds unless `touch` is False (a mere question). Pass
        `len(tokens) - 1` as limit, so that one token is left to compute logits from (W04).
        """
        if not self.prefix_cache:
            return Match(0, [])
        found = self._tree.match(root, self._packed(tokens, 0, limit_tokens // self.block_tokens), touch=touch)
        return Match(len(found) * self.block_tokens, found)

    def open(
        self, root: bytes, tokens: "array[int]", limit_tokens: int, *, read: bool = True, store: bool = True
    ) -> Sequence:
        """Begins a request: matches its prefix, locks it, and returns it as the leading blocks of a Sequence.

        `read` False: nothing is matched. `store` False: nothing will be published (no_store). Never fails for
        want of blocks, since it takes none.
        """
        space = self._tree.space(root)
        limit = limit_tokens // self.block_tokens if read and self.prefix_cache else 0
        node, blocks = self._tree.descend(space, self._packed(tokens, 0, limit))
        self._tree.lock(node)
        return Sequence(root, node, space, store and self.prefix_cache, blocks, len(blocks))

    def grow(self, seq: Sequence, tokens_total: int) -> bool:
        """Makes `seq` own enough blocks for positions [0, tokens_total), evicting unlocked leaves as needed.

        All or nothing: False leaves everything as it was, evicts nothing. Never shrinks.
        """
        self._check_open(seq)
        need = self.blocks_for(tokens_total) - len(seq.blocks)
        if need <= 0:
            return True
        if need > self.available:
            return False
        if need > self._pool.free:
            self._pool.release(self._tree.evict(need - self._pool.free), TREE)
        seq.blocks += self._pool.allocate(need)
        return True

    def publish(
        self, seq: Sequence, tokens: "array[int]", computed: int, *, saved: bool = False, in_use: bool = False
    ) -> list[CachedBlock]:
        """Puts the full blocks of positions [0, computed), whose KV is in the pool, into the tree.

        Where the tree has a block already, the sequence's own copy is freed and `seq.blocks` names the tree's
        (W17). The lock moves to the new end. Returns the blocks that are new in the tree, in order, for the save
        path; `saved` marks them as held by the store. `in_use`: a plan in flight names the sequence's own copies, so
        those that are given up are pinned, and noted in `seq.replaced` for whoever unpins them. Cheap when no further
        block is full. A sequence that does not store, or whose namespace or line was cleared since `open`, keeps its
        blocks to itself and gets [].
        """
        self._check_open(seq)
        first, full = seq.cached_blocks, computed // self.block_tokens
        if full <= first or not seq.store or seq.space.dead or seq.node.dead:
            return []
        if full > len(seq.blocks) or computed > len(tokens):
            raise ValueError(f"{computed} tokens computed, but {len(tokens)} given in {len(seq.blocks)} blocks")
        own = seq.blocks[first:full]
        end, canonical, known = self._tree.insert(seq.node, self._packed(tokens, first, full), own, saved=saved)
        self._pool.adopt(own[known:])
        if in_use:
            for block in own[:known]:
                self._pool.pin(block)
            seq.replaced += own[:known]
        self._pool.release(reversed(own[:known]), REQUEST)
        self._duplicates += known
        seq.blocks[first:full] = canonical
        seq.rewrites += known > 0
        seq.cached_blocks = full
        self._move_lock(seq, end)
        return self._described(seq, range(first + known, full))

    def attach(self, seq: Sequence, tokens: "array[int]", loaded: int) -> list[CachedBlock]:
        """Blocks of [0, loaded) have arrived from the store, checked: they become the tree's, marked saved.

        Unpin them first. The blocks were owned by `grow` before the copy began.
        """
        return self.publish(seq, tokens, loaded, saved=True)

    def close(self, seq: Sequence, tokens: "array[int]", computed: int) -> list[CachedBlock]:
        """Ends a request, finished or retracted: publishes what is computed, unlocks it, frees the rest.

        Returns what `publish` returned. Blocks with a copy in flight are freed at their last unpin (W23).
        OwnershipError when the sequence is closed already.
        """
        new = self.publish(seq, tokens, computed)
        self._pool.release(reversed(seq.blocks[seq.cached_blocks :]), REQUEST)
        self._pool.release(self._tree.unlock(seq.node), TREE)
        seq.closed = True
        seq.blocks = []
        return new

    # --- copies in flight ---------------------------------------------------------------------------------------

    def pin(self, block: int) -> None:
        """A copy from or into `block` starts: until `unpin` it is neither evicted nor given to anyone else."""
        self._pool.pin(block)
        if self._pool.owner(block) == TREE:
            self._tree.pin(block)

    def unpin(self, block: int) -> None:
        """A copy ended; pins count, so two copies need two unpins. OwnershipError when there was none."""
        in_tree = self._pool.owner(block) == TREE
        self._pool.unpin(block)
        if in_tree:
            self._pool.release(self._tree.unpin(block), TREE)

    # --- identities and hints -----------------------------------------------------------------------------------

    def identities(self, root: bytes, tokens: "array[int]", blocks: int) -> bytes:
        """Identities of the first `blocks` full blocks of `tokens`, 32 bytes each in one blob."""
        return b"".join(identity.chain(self._key, root, self._packed(tokens, 0, blocks), self.block_tokens))

    def unsaved(self, seq: Sequence) -> list[CachedBlock]:
        """The sequence's cached blocks that the store is not known to hold, in order."""
        saved = self._tree.saved
        return self._described(seq, [i for i in range(seq.cached_blocks) if seq.blocks[i] not in saved])

    def mark_saved(self, block: int, block_identity: bytes, *, saved: bool = True) -> bool:
        """Notes that the store holds this block (or no longer). False, and no effect, when `block` has gone on
        to hold something else.
        """
        return self._tree.mark_saved(block, block_identity, saved)

    def is_saved(self, block: int) -> bool:
        """Whether `block` is cached and the store was last known to hold it: a hint, never a promise."""
        return block in self._tree.saved

    def holds(self, block: int, block_identity: bytes) -> bool:
        """Whether `block` is cached and still is the block of that identity."""
        return self._tree.holds(block) and self._tree.identity(block) == block_identity

    def all_unsaved(self) -> list[tuple[bytes, CachedBlock]]:
        """(root, block) of everything cached that the store is not known to hold, parents before their children."""
        return [
            (root, CachedBlock(index, block, name, parent))
            for root, index, block, name, parent in self._tree.walk()
            if block not in self._tree.saved
        ]

    def lineage(self, root: bytes, block: int) -> list[CachedBlock]:
        """A cached block of this root and all that stand before it, first to last."""
        lineage, parent = list[CachedBlock](), root
        for index, each in enumerate(self._tree.path(block)):
            lineage.append(CachedBlock(index, each, self._tree.identity(each), parent))
            parent = lineage[-1].identity
        return lineage

    def forget_saved(self) -> None:
        """Takes every saved hint back: the store lost what it held."""
        self._tree.saved.clear()

    # --- the whole ----------------------------------------------------------------------------------------------

    def clear(self, chosen: Callable[[bytes], bool] = lambda root: True) -> int:
        """Forgets everything cached, or the namespaces whose root is chosen; returns the blocks dropped from the index.

        Running requests finish on their blocks, publish nothing more, and free them when they close.
        """
        before = self._tree.indexed
        self._pool.release(self._tree.clear(chosen), TREE)
        return before - self._tree.indexed

    def clear_line(self, root: bytes, first: bytes) -> int:
        """The same for what begins with these tokens, one block of packed u32, in one namespace.

        Who has none of it in the tree yet is not known here: take `store` from those sequences.
        """
        before = self._tree.indexed
        self._pool.release(self._tree.clear_line(root, first), TREE)
        return before - self._tree.indexed

    def statistics(self) -> KVStatistics:
        """Numbers of now and since the start, in O(1)."""
        pool, tree = self._pool.statistics(), self._tree.statistics()
        return KVStatistics(
            total=pool.total,
            free=pool.free,
            cached=tree.evictable,
            locked=pool.request + pool.copy + tree.protected,
            nodes=tree.nodes,
            inserted=tree.inserted,
            duplicates=self._duplicates,
            evicted=tree.evicted,
        )

    def check_integrity(self) -> None:
        """Checks pool, tree, and that they agree; raises with the numbers. O(everything): for idle and tests."""
        self._pool.check_integrity()
        self._tree.check_integrity()
        for block in range(self.total):
            if (self._pool.owner(block) == TREE) != self._tree.holds(block):
                raise OwnershipError(f"block {block}: pool and tree disagree about who owns it")
        now = self.statistics()
        if now.free + now.cached + now.locked != now.total:
            raise OwnershipError(f"free + cached + locked != total: {now}")

    def _packed(self, tokens: "array[int]", first: int, last: int) -> bytes:
        """Packed u32 of the full blocks [first, last), as many as `tokens` has."""
        last = min(last, len(tokens) // self.block_tokens)
        return memoryview(tokens)[first * self.block_tokens : last * self.block_tokens].tobytes()

    def _described(self, seq: Sequence, indices: "range | list[int]") -> list[CachedBlock]:
        def name(index: int) -> bytes:
            return self._tree.identity(seq.blocks[index]) if index >= 0 else seq.root

        return [CachedBlock(i, seq.blocks[i], name(i), name(i - 1)) for i in indices]

    def _move_lock(self, seq: Sequence, end: Node) -> None:
        if end is not seq.node:
            self._tree.lock(end)
            self._pool.release(self._tree.unlock(seq.node), TREE)
            seq.node = end

    def _check_open(self, seq: Sequence) -> None:
        if seq.closed:
            raise OwnershipError("the sequence is closed; its blocks belong to others now")
