"""Tasks define the serving spec of their models."""

from nestrec.serving.model.serving_spec import serving_spec_of
from nestrec.training.recipes import recipe


def test_task_serving_spec_defines_role_and_inputs() -> None:
    retrieval, ranking = serving_spec_of(recipe("demo").task), serving_spec_of(recipe("kuairand_ranking").task)
    assert (retrieval.role, ranking.role) == ("retrieval", "ranking")
    assert (retrieval.index is None, ranking.index is None) == (False, True)
    assert (retrieval.needs_event, ranking.reads_actions) == (True, True)
