"""The `kite` command put together: one Typer for every noun, and the commands without one."""

import typer

from kite_cli import (
    adapter,
    config,
    demo,
    doctor,
    gap,
    guard,
    incident,
    init,
    key,
    ledger,
    probes,
    routes,
    trace,
    up,
    upcycle,
    want,
    yoco,
)
from kite_cli.eval import register as register_eval


def build() -> typer.Typer:
    """Return the whole command."""
    app = typer.Typer(
        name="kite",
        help="KITE runs a fleet of vLLM servers. Commands marked [reads] look, those marked [changes] do something.",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    up.register(app)
    demo.register(app)
    init.register(app)
    doctor.register(app)
    incident.register(app)
    trace.register(app)
    routes.register(app)
    register_eval(app)
    want.register(yoco.app)
    app.add_typer(upcycle.app, name="upcycle")
    app.add_typer(adapter.app, name="adapter")
    app.add_typer(yoco.app, name="yoco")
    app.add_typer(guard.app, name="guard")
    app.add_typer(probes.app, name="probes")
    app.add_typer(config.app, name="config")
    app.add_typer(ledger.app, name="ledger")
    app.add_typer(gap.app, name="gap")
    app.add_typer(key.app, name="key")
    return app
