"""`nestrec publish`: a run that is not under way, as the newest version at an address."""

from pathlib import Path

from nestrec.base.bounds import Count
from nestrec.base.config import config
from nestrec.base.errors import UserError
from nestrec.serving.model.export import restored_session
from nestrec.serving.versions.publisher import Publisher
from nestrec.serving.versions.reader import VersionStep
from nestrec.training.publishing import PublishConfig
from nestrec.training.run_folder import RunFolder


@config
class PublishRunConfig:
    keep: Count = PublishConfig().keep
    """newest versions that stay when one is added, and what they build on; a server can be pinned to any of them"""


def publish_run(run: Path, address: str, cfg: PublishRunConfig | None = None, *, best: bool = True) -> VersionStep:
    """The best (or last) weights of a run, in full, unless the newest version is that already."""
    problems: list[str] = []
    with restored_session(run, best=best) as (session, step):
        publisher = Publisher(
            PublishConfig(address=address, keep=(cfg or PublishRunConfig()).keep),
            session,
            RunFolder(run).identity(),
            step,
            warn=problems.append,
        )
        publisher.publish(session, step)
        publisher.close()
    if publisher.newest is None:
        remedy = "mend the cause, and publish again"
        raise UserError("; ".join(problems), field="ADDRESS", value=address, remedy=remedy)
    return publisher.newest
