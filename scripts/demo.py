"""Opens a page in the browser to try a trained model on: photos, sentences, or a user's id.

    python -m scripts.demo --workdir=runs/ssd_digits

The page is on http://127.0.0.1:8080, for this machine only, and sends nothing elsewhere. It needs
NiceGUI: pip install 'nicegui>=3.18,<4'. predict.py gives the same answers.
"""

import importlib.util
import socket
import sys

from common import entry
from engine import environment

environment.set_defaults(TF_CPP_MIN_LOG_LEVEL="3")

# The environment decides how libraries start.
from common import console  # noqa: E402
from common.errors import ConfigError, UserError, one_line  # noqa: E402


def main(argv: list[str] | None = None) -> None:
    """The command line; argv without the program's name."""
    parser = console.Parser(prog="demo", description=console.summary(__doc__))
    add = parser.add_argument
    add(
        "--workdir",
        required=True,
        help="the run's folder, or WORKDIR/checkpoints/STEP; local or gs://",
    )
    add("--checkpoint", default="latest", help="latest, best or a step")
    add("--data_dir", help="where the vocabulary or the ratings are, if not where the run had them")
    add(
        "--accept_other_data",
        action="store_true",
        help="use the model although its data have other classes by now",
    )
    add("--host", default="127.0.0.1", help="the address; 0.0.0.0 lets other machines in")
    add("--port", type=console.integer(1, 65535), default=8080, help="the port of the page")
    add("--no_browser", action="store_true", help="opens no browser")
    args = parser.parse_args(console.underscored(sys.argv[1:] if argv is None else argv))
    try:
        if importlib.util.find_spec("nicegui") is None:
            raise ConfigError("the page needs NiceGUI: pip install 'nicegui>=3.18,<4'")
        _check_address(args.host, args.port)
        from commands import demo as demos
        from engine import model_source

        environment.show_log(sys.stderr)
        model = model_source.load(args.workdir, args.checkpoint)
        if args.data_dir:
            model = model.changed(data_dir=args.data_dir)
        demo = demos.make_demo(model, args.accept_other_data)
    except UserError as error:
        sys.exit(f"demo: {error}")
    print(f"open http://{args.host}:{args.port} (Ctrl-C ends)", flush=True)
    demos.serve(demo, args.host, args.port, not args.no_browser)


def _check_address(host: str, port: int) -> None:
    """Raises ConfigError if no page can be served at the address, before a model is loaded."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise ConfigError(
            f"--host={host} --port={port}: {one_line(error)}; give another --port or --host"
        ) from error


if __name__ == "__main__":
    entry.run(main)
