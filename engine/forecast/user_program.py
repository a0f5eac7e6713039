"""Loads a program of the user's, lowers it for a slice that only libtpu describes, compiles it.

Runs in another process, as the worker of `engine.forecast.forecasts`. jax runs on the CPUs there;
only what is lowered is for the TPUs of the slice.
"""

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import math
import numbers
import os
import re
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import jax
import jax.experimental.mesh_utils
import jax.export
from jax.experimental import topologies

from common.errors import INVALID, ConfigError, UserError, one_line
from engine.forecast import kernels, stablehlo, worker
from engine.forecast.cache import placement
from engine.forecast.forecasts import Answer, Request
from engine.forecast.program import compile_program
from engine.forecast.topology import parse_slices

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_OURS = ("common", "engine")
# Code that is not the user's: a message should name a line of the code that calls it.
_LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    os.path.join(_ROOT, "engine"),
    "<",
)
_SHAPES = (
    "the devices of the slice only describe it, they cannot hold or compute arrays: return shapes, "
    "jax.ShapeDtypeStruct(shape, dtype, sharding=...), for instance from jax.eval_shape"
)
_NO_DEVICE = re.compile(r"compile-only client|'(Compile\w+|Executable)' object has no attribute")
_ADVICE = re.compile(r"\.? Please (file an issue|report a bug) at\S* ?\S*")


class ProgramError(UserError):
    """The user's code cannot be forecast; the message is one line."""


# Loading.


@contextlib.contextmanager
def _world(devices: Sequence[Any], path: Sequence[str]) -> Iterator[None]:
    """The user's code sees its own modules, and a jax that has the devices of the slice.

    A folder of the user's may have the name of a package here, such as `common`.
    """
    theirs = [name for name in _OURS if importlib.machinery.PathFinder.find_spec(name, path)]
    ours = {name: one for name, one in sys.modules.items() if name.split(".")[0] in theirs}
    for name in ours:
        del sys.modules[name]
    before, sys.path[:] = sys.path[:], path
    local = [device for device in devices if device.process_index == devices[0].process_index]
    hosts = len({device.process_index for device in devices})
    answers: dict[str, Any] = {"default_backend": "tpu", "process_count": hosts}
    answers |= {"device_count": len(devices), "local_device_count": len(local)}
    answers |= {"devices": devices, "local_devices": local}
    try:
        with contextlib.ExitStack() as stack:
            for name, value in answers.items():
                patch = _answer(getattr(jax, name), value)
                stack.enter_context(mock.patch.object(jax, name, patch))
            for module, name in (
                (jax, "make_mesh"),
                (jax.experimental.mesh_utils, "create_device_mesh"),
            ):
                patch = _with_devices(getattr(module, name), devices)
                stack.enter_context(mock.patch.object(module, name, patch))
            yield
    finally:
        sys.path[:] = before
        for name in [name for name in sys.modules if name.split(".")[0] in theirs]:
            del sys.modules[name]
        sys.modules.update(ours)


def _answer(function: Callable[..., Any], value: Any) -> Callable[..., Any]:
    """A function of jax that has this value, but for a backend such as "cpu"."""

    def answer(*arguments: Any, **named: Any) -> Any:
        backend = arguments[0] if arguments else named.get("backend")
        if backend in (None, "tpu"):
            return list(value) if isinstance(value, list | tuple) else value
        return function(*arguments, **named)

    return answer


def _with_devices(function: Callable[..., Any], devices: Sequence[Any]) -> Callable[..., Any]:
    """`jax.make_mesh` and its like, with the slice's devices by default."""
    parameters = inspect.signature(function)

    def make(*arguments: Any, **named: Any) -> Any:
        bound = parameters.bind(*arguments, **named)
        if bound.arguments.get("devices") is None:
            bound.arguments["devices"] = list(devices)
        return function(*bound.args, **bound.kwargs)

    return make


def _load(target: tuple[str, str]) -> Any:
    """The function that `target` names."""
    where, name = target
    if where.endswith(".py"):
        stem = os.path.splitext(os.path.basename(where))[0]
        stem = f"user_{stem}" if stem in sys.modules else stem
        sys.path.insert(0, os.path.dirname(os.path.abspath(where)))
        spec = importlib.util.spec_from_file_location(stem, where)
        assert spec and spec.loader
        module = sys.modules[stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        if importlib.util.find_spec(where.split(".")[0]) is None:
            raise ConfigError(
                f"there is no module {where!r}, neither here nor installed for {sys.executable}; "
                f"a file is given with its ending: path/to/file.py:{name}",
                INVALID,
            )
        module = importlib.import_module(where)
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        has = [n for n, one in vars(module).items() if callable(one) and n[0] != "_"][-8:]
        raise ConfigError(
            f"{where} has no function {name!r}; it has {', '.join(has) or 'none'}", INVALID
        ) from None


# Lowering.


def lower(made: Any, devices: Sequence[Any]) -> tuple[Any, int | None]:
    """Lowers what `make` returned, for devices of the slice.

    Returns a `jax.stages.Lowered`, and how many examples a call has, if `make` says it.
    """
    if isinstance(made, jax.stages.Lowered):  # already done
        return made, None
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not callable(made[0]):
        raise ProgramError(
            f"it must return (function, arguments), not {_described(made)}: "
            "return step, (state, batch)"
        )
    function, arguments, *rest = made
    examples = rest[0] if rest else None
    if examples is not None and (not isinstance(examples, numbers.Integral) or examples < 1):
        raise ProgramError(
            "the third value that it returns, if any, must be the number of examples in a call, "
            f"not {_described(examples)}"
        )
    if not isinstance(arguments, tuple):
        raise ProgramError(
            "the second value that it returns must be a tuple with one item for each argument "
            f"of the function, not {_described(arguments)}: return step, (state, batch)"
        )
    arguments = jax.tree_util.tree_map_with_path(
        functools.partial(_abstract, devices[0].platform), arguments
    )
    if not hasattr(function, "trace"):  # equinox's jitted functions trace arrays alone, not shapes
        # A pmap is a function that would lose its axis without its wrapper.
        is_pmap = isinstance(function, types.FunctionType)
        function = function if is_pmap else getattr(function, "__wrapped__", function)
        function = _jitted(function, arguments)
        arguments = jax.tree.map(lambda leaf: leaf if _is_array(leaf) else None, arguments)
    examples = None if examples is None else int(examples)
    # Tracing may compute constants, on the CPU; lowering asks for which device the program is.
    traced = function.trace(*arguments)
    with jax.default_device(devices[0]):
        lowered = traced.lower()
    return getattr(lowered, "lowered", lowered), examples  # flax's nnx wraps jax's


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)} ({', '.join(type(one).__name__ for one in value[:4])})"
    return "None" if value is None else f"{type(value).__name__}"


def _abstract(platform: str, path: Any, leaf: Any) -> Any:
    """An array as its shape; what is on this machine's CPUs loses its placement."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return leaf
    found = {device.platform for device in getattr(sharding, "device_set", ())}
    if platform not in found and len(getattr(sharding, "device_set", ())) > 1:
        raise ProgramError(
            f"argument {jax.tree_util.keystr(path)} has a sharding over this machine's "
            f"{', '.join(found)}: build the mesh of the devices that make gets"
        )
    options = {"weak_type": True} if getattr(leaf, "weak_type", False) else {}
    where = sharding if platform in found or not found else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where, **options)


def _jitted(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """A plain function under `jax.jit`.

    Its arguments are None where `arguments` have something that is no array, which is constant.
    """
    leaves, tree = jax.tree.flatten(arguments, is_leaf=_is_none)
    if all(map(_is_array, leaves)):
        return jax.jit(function)

    @functools.wraps(function)
    def with_constants(*given: Any) -> list[Any]:
        arrays = jax.tree.leaves(given, is_leaf=_is_none)
        both = [a if a is not None else leaf for a, leaf in zip(arrays, leaves, strict=True)]
        return [*filter(_is_array, jax.tree.leaves(function(*jax.tree.unflatten(tree, both))))]

    return jax.jit(with_constants)


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def argument_bytes(lowered: Any) -> list[tuple[str, int]]:
    """(name, bytes on a device) of each argument that a program uses, without padding to tiles."""
    details = getattr(lowered._lowering, "compile_args", {})
    leaves = jax.tree_util.tree_flatten_with_path(lowered.args_info)[0]
    kept = sorted(details.get("kept_var_idx") or range(len(leaves)))
    shardings = dict(zip(kept, details.get("in_shardings") or (), strict=False))
    info = getattr(details.get("all_args_info"), "debug_info", None)
    names = getattr(info, "arg_names", None) or ()
    found = []
    for i in kept:
        path, leaf = leaves[i]
        shape = leaf.shape
        with contextlib.suppress(AttributeError, ValueError, TypeError):  # where it is unspecified
            shape = shardings[i].shard_shape(shape)
        # (args, kwargs) are the outermost levels.
        name = names[i] if i < len(names) and names[i] else jax.tree_util.keystr(path[1:])
        found.append((name, math.prod(shape) * leaf.dtype.itemsize))
    return found


# In the worker.


def answer(request: Request, say: Callable[[str], None]) -> Answer:
    """Compiles a program for a slice in this process, which libtpu may crash."""
    (topology,) = parse_slices(request.topology)
    os.chdir(request.folder)
    with contextlib.suppress(ImportError, AttributeError):  # no line of this file is the user's
        from jax._src import source_info_util

        source_info_util.register_exclusion(os.path.dirname(os.path.abspath(__file__)))
    try:
        kernels.ask_for_bundles()  # before libtpu is loaded
        described = topologies.get_topology_desc(topology.name, "tpu", **topology.options)
        devices: Any = described.devices
    except (RuntimeError, ValueError, OSError) as error:
        return Answer(error=f"libtpu cannot describe {topology.name}: {one_line(error)}")
    try:
        say("tracing the program")
        lowered, examples = _lowered(request, devices)
    except ProgramError as error:
        return Answer(error=str(error))
    text = lowered.as_text()
    callbacks = len(
        re.findall(r"stablehlo\.send\b[^\n]*is_host_transfer = true|_python_\w*callback", text)
    )
    found = Answer(used=len(placement(lowered)), callbacks=callbacks, examples=examples)
    arguments: list[tuple[str, int]] = []
    with contextlib.suppress(Exception):  # a stranger's tree: names are no reason to fail
        arguments = argument_bytes(lowered)
    padded: tuple[int, ...] = ()
    try:
        program = compile_program(lowered, topology, lambda text: say(f"compiling ({text})"))
        found, padded = found._replace(program=program, fits=True), program.parameters
    except Exception as error:
        text, fits = worker.refusal(error, "the program")
        place = "" if isinstance(error, jax.errors.JaxRuntimeError) else _place(error)  # a kernel
        found = found._replace(error=f"{_ADVICE.sub('', text)}{place}", fits=fits)
    if len(padded) == len(arguments):
        arguments = [(name, size) for (name, _), size in zip(arguments, padded, strict=True)]
    return found._replace(arguments=tuple(sorted(arguments, key=lambda one: -one[1])))


def _lowered(request: Request, devices: Sequence[Any]) -> tuple[Any, int | None]:
    where, name = request.target
    if not name:
        return stablehlo.read(where, devices), None
    doing = f"importing {where}"
    try:
        with _world(devices, request.path):
            make = _load(request.target)
            doing = f"{name}(devices)"
            made = make(list(devices))
            doing = "tracing its function"
            lowered, examples = lower(made, devices)
    except ProgramError as error:
        raise ProgramError(f"{name}: {error}") from error
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        if doing.startswith("importing"):  # for all slices alike
            raise ConfigError(_said(error, doing), INVALID) from error
        raise ProgramError(_said(error, doing)) from error
    others = {device.platform for device in placement(lowered)} - {devices[0].platform}
    if others or not placement(lowered):
        raise ProgramError(
            f"the program is for this machine's {', '.join(others) or 'CPU'}, not for the slice: "
            f"build its meshes and shardings of the devices that {name} gets"
        )
    return lowered, examples


def _said(error: BaseException, doing: str) -> str:
    """An exception of the user's code, with the line of it, in one line."""
    text = _ADVICE.sub("", one_line(error))
    if _NO_DEVICE.search(str(error)):
        text = f"{_SHAPES} ({text})"
    return f"{doing} raised {type(error).__name__}{_place(error)}: {text}"


def _place(error: BaseException) -> str:
    """ " at file.py:12": the last line of the user's code that led to an exception."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{f.filename}:{f.lineno}" for f in frames if not f.filename.startswith(_LIBRARIES)]
    if isinstance(error, SyntaxError) and error.filename:
        places = [f"{error.filename}:{error.lineno}"]
    return f" at {os.path.relpath(places[-1])}" if places else ""


def work(connection: Connection) -> None:
    """Answers the request of the parent."""
    request = worker.receive(connection)
    try:
        connection.send(answer(request, connection.send))
    except ConfigError as error:
        connection.send(error)
