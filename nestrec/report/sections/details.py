"""What is needed to repeat the run: versions, config and what happened."""

import json

from nestrec.report.markup import Markup, element
from nestrec.report.run_folder import RunRecords
from nestrec.report.sections.dataset import facts_table


def versions(run: RunRecords) -> Markup | None:
    """Software, machine and command."""
    command = run.versions.get("command")
    table = facts_table("Software and machine", {name: str(v) for name, v in run.versions.items() if name != "command"})
    shown = element("pre", str(command)) if command else None
    return element("div", shown, element("div", table, class_="tables")) if run.versions else None


def configuration(run: RunRecords) -> Markup | None:
    """The resolved config, folded away."""
    text = json.dumps(run.config, indent=2, ensure_ascii=False)
    return element("details", element("summary", "Show"), element("pre", text)) if run.config else None


def events(run: RunRecords) -> Markup | None:
    """Resumptions, warnings and the like."""
    rows = [element("li", element("b", f"step {event['step']:,}"), " ", event["text"]) for event in run.events]
    return element("ul", rows) if rows else None
