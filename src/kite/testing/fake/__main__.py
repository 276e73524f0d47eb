"""Run the fake until SIGTERM or SIGINT."""

import argparse
import signal
import sys
import threading
from pathlib import Path
from typing import cast

from kite import telemetry
from kite.errors import KiteError
from kite.held import gate
from kite.testing.fake.cache import PrefixCache
from kite.testing.fake.model import Served
from kite.testing.fake.server import Fake, Server
from kite.testing.fake.spans import start_tracing

HOST = "127.0.0.1"


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="kite.testing.fake", description=__doc__)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--served-name", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, default=2_048)
    parser.add_argument("--max-loras", type=int, default=8)
    parser.add_argument("--max-lora-rank", type=int, default=16)
    parser.add_argument("--block-size", type=int, default=32, help="tokens per block of the prefix cache")
    return parser.parse_args()


def serve(options: argparse.Namespace) -> None:
    """Load the base, listen, and return after a signal. Raises KiteError or OSError when it cannot begin."""
    gate.wait()
    served = Served.open(
        cast("str", options.served_name),
        cast("Path", options.base),
        max_model_len=cast("int", options.max_model_len),
        max_loras=cast("int", options.max_loras),
        max_lora_rank=cast("int", options.max_lora_rank),
    )
    stop_tracing = start_tracing()
    fake = Fake(served, PrefixCache(cast("int", options.block_size)))
    telemetry.start(fake.totals)
    with Server((HOST, cast("int", options.port)), fake) as server:

        def end(number: int, frame: object) -> None:
            del number, frame
            threading.Thread(target=server.shutdown).start()  # it waits for the loop that this handler interrupts

        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, end)
        server.serve_forever(poll_interval=0.05)
    stop_tracing()


def main() -> int:
    """Return 0 after a signal, 1 with one line on stderr when it could not begin."""
    try:
        serve(arguments())
    except (KiteError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
