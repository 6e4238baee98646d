"""`trimtab doctor [RUN]`"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.output import console_file, loading, print_json, user_errors


def doctor(
    run: Annotated[Path | None, typer.Argument(help="Run folder. Without it, the command checks this machine.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", metavar="ADDRESS", help="Check a Ray cluster: its head's HOST:PORT, or auto for the one here."
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Count warnings as unhealthy, too.")] = False,
    rules: Annotated[bool, typer.Option("--rules", help="Print the rules as a Markdown table and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Say what is wrong with a run, or with this machine, and what to change. Exit status: 0 healthy, 1 not, 2 an error."""
    with user_errors(as_json):
        if rules:
            from trimtab.observe.doctor.report import rules_table
            from trimtab.observe.doctor.rules import RULES

            print(rules_table(RULES), end="")
            return
        if cluster is not None:
            healthy = _cluster(cluster, strict, as_json)
        else:
            healthy = _run(run, strict, as_json) if run is not None else _machine(strict, as_json)
        if not healthy:
            raise typer.Exit(1)


def _run(folder: Path, strict: bool, as_json: bool) -> bool:
    from trimtab.observe.doctor.finding import is_healthy
    from trimtab.observe.doctor.record import refuse_what_cannot_be_judged
    from trimtab.observe.doctor.report import print_report, run_report, verdict_report
    from trimtab.observe.look import look_at
    from trimtab.observe.verdict import judge

    look = look_at(folder, "trimtab doctor")
    look.reader.settings()  # or say why they cannot be read
    record = look.record
    refuse_what_cannot_be_judged(look.reader, record)
    done, verdict = look.done, judge(look)
    healthy = is_healthy(done.findings, strict)
    parts = [(part.id, part.text, part.key, part.gain, part.level) for part in verdict.parts]
    print_report(console_file(as_json), [verdict_report(parts), *run_report(folder, record, done)])
    if as_json:
        print_json(
            {
                "healthy": healthy,
                "verdict": verdict.as_json(),
                "findings": [finding.as_json() for finding in done.findings],
                "run": {"folder": str(folder), "steps": len(record.steps), "finished": record.finished},
                "rules_healthy": done.healthy,
                "rules_not_judged": done.not_judged,
            }
        )
    return healthy


def _cluster(address: str, strict: bool, as_json: bool) -> bool:
    from importlib.util import find_spec

    from trimtab.base.errors import ConfigError, Problem

    if find_spec("ray") is None:
        raise ConfigError([Problem("--cluster", "Ray is not installed here", "pip install 'trimtab[ray]'")])
    with loading(as_json, "asking the nodes, and measuring the network between them"):
        from trimtab.cluster.ray_links import look_at_cluster
        from trimtab.observe.doctor.cluster import cluster_facts, cluster_findings, cluster_json
        from trimtab.observe.doctor.finding import is_healthy
        from trimtab.observe.doctor.report import facts_report, print_report

        found = look_at_cluster(os.environ.get("RAY_ADDRESS", address) if address == "auto" else address, Path.cwd())
    findings = cluster_findings(found)
    healthy = is_healthy(findings, strict)
    print_report(console_file(as_json), facts_report(cluster_facts(found), findings))
    if as_json:
        print_json(
            {"healthy": healthy, "findings": [each.as_json() for each in findings], "cluster": cluster_json(found)}
        )
    return healthy


def _machine(strict: bool, as_json: bool) -> bool:
    from trimtab.observe.doctor.checks import machine_findings
    from trimtab.observe.doctor.finding import is_healthy
    from trimtab.observe.doctor.machine import look_at_machine
    from trimtab.observe.doctor.report import machine_report, print_report

    with loading(as_json, "asking torch and the driver"):
        machine = look_at_machine()
    findings = machine_findings(machine)
    healthy = is_healthy(findings, strict)
    print_report(console_file(as_json), machine_report(machine, findings))
    if as_json:
        found = [finding.as_json() for finding in findings]
        print_json({"healthy": healthy, "findings": found, "machine": machine.as_json()})
    return healthy
