"""Identities are equal if and only if everything that changes KV is equal, in any process, for ever."""

import os
import subprocess
import sys
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import identity

KEY = bytes(range(32))
texts = st.text(max_size=6)
fields = st.dictionaries(texts, st.one_of(texts, st.integers(0, 2**40), st.binary(max_size=6)), max_size=4)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=12)

GOLDEN = """
from array import array
from shared import identity
key = bytes(range(32))
facts = {"weights": b"abc", "layers": 30, "dtype": "fp32"}
root = identity.root(key, identity.fingerprint(facts), adapter="x", salt=identity.tenant_salt(key, "alice"))
print(root.hex(), *(h.hex() for h in identity.chain(key, root, array("I", range(40)).tobytes(), 16)))
"""


@pytest.mark.parametrize("seeds", [("1", "2"), ("0", "123"), ("random", "1")])
def test_w08_p12_names_are_equal_bytes_in_processes_with_other_hash_seeds(seeds: tuple[str, str]) -> None:
    printed = [
        subprocess.run(
            [sys.executable, "-c", GOLDEN], env=os.environ | {"PYTHONHASHSEED": s}, capture_output=True, check=True
        ).stdout
        for s in seeds
    ]
    assert printed[0] == printed[1]
    names = printed[0].split()
    assert len(names) == 3  # the root and two full blocks; the partial tail has no name
    assert all(len(bytes.fromhex(name.decode())) == 32 for name in names)


def test_w08_names_are_those_of_earlier_versions() -> None:
    """Golden values: whoever changes the derivation must raise KEY_FORMAT, or old caches answer for new keys."""
    root = identity.root(KEY, identity.fingerprint({"layers": 30, "dtype": "fp32"}), salt=b"s")
    assert identity.KEY_FORMAT == 2
    assert identity.child(KEY, root, array("I", range(16)).tobytes()).hex() == GOLDEN_CHILD


GOLDEN_CHILD = "91650ceca5b492a59f8923a931a125e938e98f512339b448914a74fd07f390d9"


@given(one=fields, other=fields)
def test_fingerprints_are_equal_only_for_equal_facts(one: dict, other: dict) -> None:
    same = {k: (type(v), v) for k, v in one.items()} == {k: (type(v), v) for k, v in other.items()}
    assert (identity.fingerprint(one) == identity.fingerprint(other)) == same


@given(facts=fields, order=st.randoms(use_true_random=False))
def test_a_fingerprint_does_not_depend_on_the_order_of_facts(facts: dict, order) -> None:
    shuffled = list(facts.items())
    order.shuffle(shuffled)
    assert identity.fingerprint(facts) == identity.fingerprint(dict(shuffled))


@given(
    a=st.tuples(st.binary(max_size=4), texts, st.binary(max_size=4)),
    b=st.tuples(st.binary(max_size=4), texts, st.binary(max_size=4)),
)
def test_roots_are_equal_only_for_equal_fingerprint_adapter_and_salt(a, b) -> None:
    one = identity.root(KEY, a[0], adapter=a[1], salt=a[2])
    assert (one == identity.root(KEY, b[0], adapter=b[1], salt=b[2])) == (a == b)


@pytest.mark.parametrize("name", ["X", "", "salt", "\x04salt"])
def test_fields_are_framed_so_an_adapter_never_equals_a_salt(name: str) -> None:
    as_adapter = identity.root(KEY, b"f" * 32, adapter=name)
    as_salt = identity.root(KEY, b"f" * 32, salt=name.encode())
    assert (as_adapter == as_salt) == (name == "")
    assert identity.root(KEY, b"f" * 32, adapter="ab", salt=b"c") != identity.root(
        KEY, b"f" * 32, adapter="a", salt=b"bc"
    )
    assert identity.fingerprint({"a": "1"}) != identity.fingerprint({"a": 1})
    assert identity.fingerprint({"a": "bc"}) != identity.fingerprint({"ab": "c"})


principals = st.one_of(st.just(identity.LOCAL), texts)
cache_salts = st.one_of(st.none(), texts)


@given(one=st.tuples(principals, cache_salts), other=st.tuples(principals, cache_salts))
def test_two_requests_share_a_namespace_only_if_principal_and_salt_are_equal(one, other) -> None:
    salts = [identity.namespace_salt(KEY, *each) for each in (one, other)]
    assert (salts[0] == salts[1]) == (one == other)
    roots = [identity.root(KEY, b"f" * 32, salt=salt) for salt in salts]
    assert (roots[0] == roots[1]) == (one == other)


def test_u3_a_salt_that_a_client_writes_reaches_no_other_tenant() -> None:
    """Whatever a client names as its salt: not the namespace of another principal, nor the one without a salt."""
    alice = {identity.namespace_salt(KEY, "alice", named) for named in (None, "", "x", "alice", "bob", "local")}
    bob = {identity.namespace_salt(KEY, "bob", named) for named in (None, "", "x", "alice", "bob", "local")}
    ours = {identity.namespace_salt(KEY, identity.LOCAL, named) for named in (None, "", "x", "alice", "bob", "local")}
    assert len(alice | bob | ours) == 18
    guesses = [identity.tenant_salt(KEY, "bob"), identity.tenant_salt(KEY, "bob").hex(), "tenant:bob", "\x06tenantbob"]
    for guess in guesses:
        text = guess if isinstance(guess, str) else guess.decode("latin-1")
        assert identity.namespace_salt(KEY, "alice", text) not in bob
    assert identity.namespace_salt(KEY, identity.LOCAL) == b""  # a user without keys is the default tenant


def test_a_root_names_its_model_tenant_and_salt_and_an_adapter_changes_none_of_them() -> None:
    models, people, named = (b"f" * 32, b"g" * 32), (identity.LOCAL, "alice", "bob"), (None, "", "x")
    seen: dict[str, set[bytes]] = {"model": set(), "tenant": set(), "salt": set(), "whole": set()}
    for model in models:
        for principal in people:
            for text in named:
                salt = identity.namespace_salt(KEY, principal, text)
                root, adapted = (identity.root(KEY, model, adapter=name, salt=salt) for name in ("", "lora"))
                assert root[:16] == adapted[:16]
                assert root[16:] != adapted[16:]
                assert root[identity.MODEL] == identity.model_part(KEY, model)
                assert root[identity.TENANT] == identity.tenant_part(KEY, salt)
                assert root[identity.SALT] == identity.salt_part(KEY, salt)
                seen["model"].add(root[identity.MODEL])
                seen["tenant"].add(root[identity.TENANT])
                seen["salt"].add(root[identity.SALT])
                seen["whole"] |= {root[16:], adapted[16:]}
    # a salt's part covers its tenant, so the one of no salt is the only one that tenants have in common
    assert {name: len(parts) for name, parts in seen.items()} == {"model": 2, "tenant": 3, "salt": 7, "whole": 36}


@given(one=tokens, other=tokens, block_tokens=st.sampled_from([1, 2, 4]))
def test_a_block_is_shared_if_and_only_if_all_tokens_up_to_its_end_are_equal(one, other, block_tokens: int) -> None:
    root = b"r" * 32
    names = [list(identity.chain(KEY, root, array("I", ids).tobytes(), block_tokens)) for ids in (one, other)]
    assert [len(n) for n in names] == [len(one) // block_tokens, len(other) // block_tokens]
    for i in range(len(names[0])):
        for j in range(len(names[1])):
            prefixes_equal = one[: (i + 1) * block_tokens] == other[: (j + 1) * block_tokens]
            assert (names[0][i] == names[1][j]) == prefixes_equal


@given(a=st.binary(min_size=32, max_size=32), b=st.binary(min_size=32, max_size=32))
def test_another_key_another_name(a: bytes, b: bytes) -> None:
    for make in (
        lambda key: identity.root(key, b"f" * 32),
        lambda key: identity.child(key, b"p" * 32, b"tokens"),
        lambda key: identity.tenant_salt(key, "alice"),
    ):
        assert (make(a) == make(b)) == (a == b)


def test_a_truncated_key_is_refused_and_a_new_one_is_private(tmp_path) -> None:
    path = tmp_path / "identity.key"
    key = identity.load_or_create_key(path)
    assert identity.load_or_create_key(path) == key
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["identity.key"]
    path.write_bytes(key[:31])
    with pytest.raises(identity.KeyDamaged, match="31 bytes, a key has 32"):
        identity.load_or_create_key(path)
