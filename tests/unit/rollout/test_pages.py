"""The page pool: reservations, reference counts, copy-on-write, shared prefixes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leanroll.errors import ConfigError
from leanroll.kernels.scorers import get_scorer
from leanroll.rollout.pages import GIB, NO_PARENT, PagePool, pages_for_memory


def make_pool(num_pages=16, page_size=8, sparse_layers=(1,)):
    return PagePool(
        num_pages=num_pages,
        page_size=page_size,
        num_layers=2,
        num_kv_heads=1,
        head_dim=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
        scorer=get_scorer("mean"),
        sparse_layers=sparse_layers,
    )


def test_only_sparse_layers_have_landmarks():
    dense, sparse = make_pool().layers
    assert dense.landmarks is None
    assert sparse.landmarks is not None


def test_a_reservation_is_kept_from_others():
    pool = make_pool(num_pages=4)
    assert pool.reserve(3)
    assert not pool.reserve(2)
    assert pool.num_available == 1
    pages = pool.take(3)
    pool.release(pages)
    assert (pool.num_available, pool.num_used, pool.num_reserved) == (4, 0, 0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "share", "release", "unreserve"]), st.integers(0, 5)), max_size=40))
def test_no_sequence_of_operations_loses_or_doubles_a_page(operations):
    pool = make_pool()
    held: list[list[int]] = []
    for operation, n in operations:
        if operation == "take" and pool.reserve(n):
            held.append(pool.take(n))
        elif operation == "share" and held:
            pool.share(held[n % len(held)])
            held.append(list(held[n % len(held)]))
        elif operation == "release" and held:
            pool.release(held.pop(n % len(held)))
        elif operation == "unreserve" and pool.reserve(n):
            pool.unreserve(n)
        used = {page for pages in held for page in pages}
        assert pool.num_used == len(used)
        assert pool.num_available == 16 - len(used)
    for pages in held:
        pool.release(pages)
    assert pool.num_used == 0


def test_misuse_is_caught():
    pool = make_pool()
    with pytest.raises(AssertionError, match="reservation"):
        pool.take(1)
    assert pool.reserve(1)
    page = pool.take(1)
    pool.release(page)
    with pytest.raises(AssertionError, match="twice"):
        pool.release(page)
    with pytest.raises(AssertionError, match="in use"):
        pool.share(page)


def test_copy_copies_every_layer():
    pool = make_pool()
    pool.reserve(2)
    source, target = pool.take(2)
    pool.k[:, source], pool.v[:, source] = 1.5, 2.5
    pool.copy([source], [target])
    assert (pool.k[:, target] == 1.5).all()
    assert (pool.v[:, target] == 2.5).all()


def test_prefixes_match_page_by_page_until_forgotten():
    pool = make_pool()
    tokens = tuple(range(24))
    pool.reserve(3)
    pages = pool.take(3)
    for i, page in enumerate(pages):
        pool.remember_prefix(pages[i - 1] if i else NO_PARENT, tokens[8 * i : 8 * i + 8], page)
    assert pool.match_prefix(tokens, 3) == pages
    assert pool.match_prefix(tokens, 2) == pages[:2]
    assert pool.match_prefix((*tokens[:8], 99, *tokens[9:]), 3) == pages[:1]
    # The same tokens after another beginning are another prefix.
    assert pool.match_prefix(tokens[8:], 3) == []
    pool.release(pages)
    assert pool.match_prefix(tokens, 3) == []


def test_memory_counts_landmarks():
    shape = dict(page_size=8, num_layers=2, num_kv_heads=1, head_dim=4, dtype=torch.float32, scorer=get_scorer("mean"))
    page_bytes = 2 * 2 * 8 * 4 * 4 + 1 * 4 * 4
    assert pages_for_memory(10 * page_bytes / GIB, num_sparse_layers=1, **shape) == 10
    shape["scorer"] = get_scorer("keys-int4")
    packed_bytes = 2 * 2 * 8 * 4 * 4 + 1 * (8 * 8 + 8 * 2)
    assert pages_for_memory(10 * packed_bytes / GIB, num_sparse_layers=1, **shape) == 10
    with pytest.raises(ConfigError, match="raise it"):
        pages_for_memory(0.5 * page_bytes / GIB, num_sparse_layers=1, **shape)
    for senseless in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="positive"):
            pages_for_memory(senseless, num_sparse_layers=1, **shape)


def test_memory_that_the_system_does_not_have():
    with pytest.raises(ConfigError, match="lower kv_memory_gib"):
        make_pool(num_pages=2**46)
