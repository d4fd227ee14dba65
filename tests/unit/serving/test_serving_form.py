"""Tasks say in which form their models are served."""

from nestrec.serving.model.serving_spec import serving_form_of
from nestrec.training.recipes import recipe


def test_tasks_say_what_their_models_are_for() -> None:
    retrieval, ranking = serving_form_of(recipe("demo").task), serving_form_of(recipe("kuairand_ranking").task)
    assert (retrieval.role, ranking.role) == ("retrieval", "ranking")
    assert (retrieval.index is None, ranking.index is None) == (False, True)
    assert (retrieval.needs_event, ranking.reads_actions) == (True, True)
