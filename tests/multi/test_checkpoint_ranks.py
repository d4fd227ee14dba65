"""Checkpoints that several processes write and read together."""

from pathlib import Path

from checkpoint_jobs import LAST_STEP, NUM_KEYS, load_chain, lose_a_peer, save_chain

from support.rank_pool import RankFailure, RankPool


def test_checkpoint_chain_of_4_ranks_loads_on_4_and_2(pools, tmp_path: Path) -> None:
    pools[4].run(save_chain, str(tmp_path))
    for world in (4, 2):
        rows: dict[int, float] = {}
        for rank_rows, state in pools[world].run(load_chain, str(tmp_path)):
            assert state == {"step": LAST_STEP}
            assert not rows.keys() & rank_rows.keys()
            rows |= rank_rows
        assert rows == {key: key + key % 5 for key in range(NUM_KEYS)}


def test_checkpoint_peer_failure_keeps_last_checkpoint(tmp_path: Path) -> None:
    pool = RankPool(3, timeout_s=60)
    try:
        first, dead, last = pool.outcomes(lose_a_peer, str(tmp_path / "checkpoints"))
    finally:
        pool.close()
    assert (first, last) == ("PeerLostError", "PeerLostError")
    assert isinstance(dead, RankFailure)
    assert dead.kind == "died"
    committed = [path.name for path in (tmp_path / "checkpoints").iterdir() if not path.name.endswith(".partial")]
    assert committed == ["step-00000001"]
