"""Checkpoints written and read by real processes over Gloo."""

from pathlib import Path

from checkpoint_jobs import LAST_STEP, NUM_KEYS, load_chain, lose_a_peer, save_chain

from support.rank_pool import RankFailure, RankPool


def test_a_chain_saved_by_4_processes_loads_on_4_and_2(pools, tmp_path: Path) -> None:
    pools[4].run(save_chain, str(tmp_path))
    for world in (4, 2):
        rows: dict[int, float] = {}
        for found, state in pools[world].run(load_chain, str(tmp_path)):
            assert state == {"step": LAST_STEP}
            assert not rows.keys() & found.keys()
            rows |= found
        assert rows == {key: key + key % 5 for key in range(NUM_KEYS)}


def test_a_peer_that_dies_is_an_error_on_the_others_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    pool = RankPool(3, timeout_s=60)
    try:
        first, dead, last = pool.outcomes(lose_a_peer, str(tmp_path / "checkpoints"))
    finally:
        pool.close()
    assert (first, last) == ("PeerLostError", "PeerLostError")
    assert isinstance(dead, RankFailure)
    assert dead.kind == "died"
    whole = [path.name for path in (tmp_path / "checkpoints").iterdir() if not path.name.endswith(".partial")]
    assert whole == ["step-00000001"]
