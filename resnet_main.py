"""Trains with the command line of the TPU tutorial's resnet_main.py.

    python resnet_main.py --data_dir=DIR --model_dir=DIR --train_batch_size=1024

The program translates the tutorial's flags, prints the command of main.py that they mean, and runs
it. Flags of main.py may stand beside them: --config.seed=1. The recipe is configs/resnet50.py
unless --config names another. docs/resnet_main.md has a table of the flags.
"""

import os
import shlex
import sys
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import yaml
from absl import flags
from etils import epath

from common import entry
from common.errors import ConfigError, one_line

_ROOT = os.path.dirname(os.path.abspath(__file__))
_RECIPE = "configs/resnet50.py"


class Flag(NamedTuple):
    """A flag of the tutorial, or a parameter of its --config_file."""

    kind: type  # bool, int, float or str
    # The flags and variables of this program that mean the same, with {} for the value; a dict by
    # value, where only some values have an equivalent; "" where none has.
    here: str | Mapping[str, str]
    note: str = ""  # what to do instead of a value not in `here`


def _all(kind: type, names: str, here: str = "--config.{name}={{}}") -> dict[str, Flag]:
    """Flags of one kind, by default with the config's key of the same name."""
    return {name: Flag(kind, here.format(name=name)) for name in names.split()}


# The flags of tensorflow/tpu's models/official/resnet/resnet_main.py of 2018 to 2026, of the copies
# in Google's MLPerf v0.5 entry, and of Paperspace/tpu-resnet.
FLAGS = {
    **_all(str, "data_dir"),
    "model_dir": Flag(str, "--workdir={}"),
    "mode": Flag(
        str,
        {
            "train_and_eval": "--mode=train_and_eval",
            "in_memory_eval": "--mode=train_and_eval",
            "train": "--mode=train",
            "eval": "--mode=eval --watch",
        },
        "use train_and_eval, train or eval",
    ),
    "eval_timeout": Flag(float, "--eval_timeout={}"),  # only with --mode=eval
    "use_tpu": Flag(bool, {"True": "", "False": "JAX_PLATFORMS=cpu"}),
    **_all(int, "train_steps train_batch_size eval_batch_size steps_per_eval log_step_count_steps"),
    # Paperspace's copy evaluates each checkpoint.
    "steps_per_checkpoint": Flag(
        int, "--config.steps_per_checkpoint={0} --config.steps_per_eval={0}"
    ),
    "stop_threshold": Flag(float, "--config.target={} --config.stop_at_target=True"),
    "learning_rate": Flag(float, "--config.base_learning_rate={}"),
    **_all(float, "base_learning_rate momentum weight_decay label_smoothing moving_average_decay"),
    "enable_lars": Flag(bool, {"False": "", "True": ""}),  # see `_lars`
    "resnet_size": Flag(int, "--config.resnet_depth={}"),
    **_all(int, "resnet_depth num_label_classes num_train_images num_eval_images image_size"),
    **_all(int, "shuffle_buffer_size"),
    **_all(str, "precision"),
    **_all(float, "bn_momentum"),
    "se_ratio": Flag(float, "--config.squeeze_excite={}"),
    "drop_connect_rate": Flag(float, "--config.drop_path={}"),
    "dropout_rate": Flag(float, "--config.dropout={}"),
    "pre_activation": Flag(
        bool, {"True": "--config.resnet_version=2", "False": "--config.resnet_version=1.5"}
    ),
    **dict.fromkeys(  # `translate` refuses one of them alone
        ("use_resnetd_stem", "resnetd_shortcut"),
        Flag(bool, {"False": "", "True": "--config.deep_stem=True"}),
    ),
    "replace_stem_max_pool": Flag(
        bool, {"False": "--config.max_pool=same", "True": "--config.max_pool=conv"}
    ),
    "preprocessing": Flag(
        str,
        {
            "resnet": "--config.preprocessing=exact",
            "vgg": "--config.preprocessing=vgg --config.input_spec=vgg",
        },
        "use resnet or vgg",
    ),
    "augment_name": Flag(
        str,
        {"randaugment": ""},  # see `_randaugment`
        "AutoAugment is not implemented; use randaugment, or --config.augmentation=trivialaugment",
    ),
    "norm_act_layer": Flag(str, {"bn_relu": ""}, "EvoNorm is not implemented; use bn_relu"),
    "dropblock_groups": Flag(
        str, {}, "DropBlock is not implemented; --config.drop_path is similar"
    ),
    "bigtable_instance": Flag(
        str, {}, "Bigtable is not read; write the records to files and give --data_dir=DIR"
    ),
    "mlperf_logging": Flag(bool, {"False": ""}, "bash run_and_time.sh writes MLPerf's logs"),
    "profile_every_n_steps": Flag(
        int, {"0": ""}, "--config.profile_steps=BEGIN:END traces these steps once"
    ),
    "export_dir": Flag(
        str,
        {},
        "train without it, and then: python main.py --mode=export --format=savedmodel "
        "--workdir=WORKDIR --out={}",
    ),
    # The parameters in these are flags, too; see `_parameters`.
    **_all(str, "config_file params_override", ""),
    # `_lars` and `_randaugment` read these.
    **_all(float, "poly_rate", ""),
    **_all(int, "randaug_num_layers randaug_magnitude", ""),
    # Without an effect; docs/resnet_main.md says why.
    **_all(
        str,
        "tpu tpu_name master eval_master gcp_project tpu_zone num_cores num_shards "
        "tpu_cores_per_host dropblock_keep_prob dropblock_size num_parallel_calls num_files_infeed "
        "prefetch_buffer_size num_prefetch_threads data_format bigtable_project bigtable_table "
        "bigtable_train_prefix bigtable_eval_prefix bigtable_column_family "
        "bigtable_column_qualifier iterations_per_loop min_eval_interval model_name "
        "inference_batch_sizes",
        "",
    ),
    **_all(
        bool,
        "prefetch_depth_auto_tune use_cache transpose_input use_eval_runner use_train_runner "
        "skip_host_call use_async_checkpointing eval_after_training export_to_tpu "
        "add_warmup_requests export_moving_average",
        "",
    ),
}

# The flag that must be given for another to have an effect.
_WITH = {
    "poly_rate": "enable_lars",
    "randaug_num_layers": "augment_name",
    "randaug_magnitude": "augment_name",
}


class Translation(NamedTuple):
    """What flags of the tutorial mean here."""

    arguments: list[str]  # flags of main.py
    variables: dict[str, str]  # of the environment
    notes: list[str]  # a line for each flag that has no effect
    rest: list[str]  # the words that are no flags of the tutorial


def translate(words: Sequence[str], names: Container[str] = FLAGS) -> Translation:
    """Translates a command line without the name of the program; flags not in `names` stay as rest.

    ConfigError has a line for each value that is of the wrong kind or has no equivalent here.
    """
    values, rest = _parse(words, names)
    parameters = _parameters(values.pop("config_file", ""), values.pop("params_override", ""))
    values = _parse(parameters, FLAGS)[0] | values  # the command line overrides the files
    arguments, notes, mistakes = [], [], []
    for name, value in values.items():
        flag, typed = FLAGS[name], f"--{name}={value}"
        here = flag.here if isinstance(flag.here, str) else flag.here.get(value)
        if name == "eval_timeout" and values.get("mode") != "eval":
            here = ""
        if here is None:
            mistakes.append(f"{typed}: {flag.note.format(value)}")
        elif here:
            arguments += [word.format(value) for word in here.split()]
        elif isinstance(flag.here, str) and _WITH.get(name) not in values:
            notes.append(f"{typed} has no effect here")
    parts = [values.get(name) == "True" for name in ("use_resnetd_stem", "resnetd_shortcut")]
    if any(parts) and not all(parts):
        mistakes.append("use_resnetd_stem and resnetd_shortcut: --config.deep_stem=True has both")
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    arguments += _randaugment(values) + _lars(values)
    variables = dict(word.split("=", 1) for word in arguments if not word.startswith("--"))
    last = {word.partition("=")[0]: word for word in arguments if word.startswith("--")}
    return Translation([*last.values()], variables, notes, rest)


def _parse(words: Sequence[str], names: Container[str]) -> tuple[dict[str, str], list[str]]:
    """The values of the tutorial's flags as text, and the other words."""
    parser = flags.FlagValues()
    parser.set_gnu_getopt(True)  # a word without -- ends nothing
    define = {
        bool: flags.DEFINE_bool,
        int: flags.DEFINE_integer,
        float: flags.DEFINE_float,
        str: flags.DEFINE_string,
    }
    for name, flag in FLAGS.items():
        if name in names:
            define[flag.kind](name, None, "", flag_values=parser)
    try:
        rest = parser(["resnet_main.py", *words], known_only=True)[1:]
    except flags.Error as error:
        raise ConfigError(one_line(error)) from error
    values = {name: parser[name].value for name in FLAGS if name in parser}
    return {name: str(value) for name, value in values.items() if value not in (None, "")}, rest


def _parameters(file: str, override: str) -> list[str]:
    """The flags that --config_file and --params_override mean.

    `file` is a YAML file, local or gs://, or ""; `override` another one, or its text, or text such
    as "train_steps=9,resnet_depth=18".
    """
    parameters: dict[str, object] = {}
    for value in filter(None, (file, override)):
        try:
            if value == file or "://" in value or not set("=:") & set(value):
                value = epath.Path(value).read_text()
            elif "=" in value.partition(":")[0]:
                value = "\n".join(pair.replace("=", ": ", 1) for pair in value.split(","))
            parameters |= yaml.safe_load(value) or {}
        except Exception as error:  # each file system has errors of its own, and so has YAML
            raise ConfigError(f"{value!r} holds no parameters: {one_line(error)}") from error
    if unknown := [name for name in parameters if name not in FLAGS]:
        raise ConfigError(f"{unknown[0]!r} is not a parameter of the tutorial's resnet_main.py")
    return [f"--{name}={value}" for name, value in parameters.items() if value is not None]


def _randaugment(values: Mapping[str, str]) -> list[str]:
    """--augment_name=randaugment, with its two further flags."""
    if values.get("augment_name") != "randaugment":
        return []
    layers, magnitude = (values.get(f"randaug_{key}") for key in ("num_layers", "magnitude"))
    return [f"--config.augmentation=randaugment:{layers or 2}x{magnitude or 9}"]


def _lars(values: Mapping[str, str]) -> list[str]:
    """--enable_lars, with the rates and the warm-up of the tutorial's lars_util.py."""
    if values.get("enable_lars") != "True":
        return []
    batch = int(values.get("train_batch_size", 1024))
    limits = ((16384, 10.0, 5), (32768, 25.0, 5), (65536, 32.0, 14), (float("inf"), 35.6, 40))
    rate, epochs = next((rate, epochs) for limit, rate, epochs in limits if batch < limit)
    return [
        "--config.optimizer=lars",
        "--config.learning_rate_schedule=polynomial",
        "--config.learning_rate_per=0",
        f"--config.base_learning_rate={values.get('poly_rate', rate)}",
        f"--config.warmup_steps={epochs} epochs",
    ]


def hint(words: Sequence[str], about: str) -> str:
    """What main.py answers to a command line with the refused flag `about`, in one line.

    "" if the tutorial has no such flag.
    """
    if about not in FLAGS:
        return ""
    # main.py has flags of these names, --tpu in one mode only.
    both = {"mode", "eval_timeout"} | ({"tpu"} if "--mode=preflight" in words else set())
    old = [name for name in FLAGS if name not in both]
    try:
        arguments, variables, notes, _ = translate(words, old)
    except ConfigError as error:
        return f"{'; '.join(str(error).splitlines())} (docs/resnet_main.md)"
    here = shlex.join([*(f"{name}={value}" for name, value in variables.items()), *arguments])
    answers = [f"give {here} instead"] if here else []
    return (
        f"--{about} is a flag of the TPU tutorial's resnet_main.py: {'; '.join(answers + notes)} "
        "(docs/resnet_main.md; python resnet_main.py takes the tutorial's flags)"
    )


def main(words: Sequence[str]) -> None:
    """Runs main.py with the arguments that the words mean."""
    if {"-h", "--help", "--helpfull", "--helpshort"} & set(words):
        print(__doc__, *(f"  --{name}" for name in FLAGS), sep="\n")
        return
    try:
        arguments, variables, notes, rest = translate(words)
    except ConfigError as error:
        sys.exit("\n".join(f"ERROR: {line}" for line in str(error).splitlines()))
    if not any(word.split("=")[0].lstrip("-") == "config" for word in rest):
        rest = [f"--config={os.path.relpath(os.path.join(_ROOT, _RECIPE))}", *rest]
    program = [os.path.relpath(os.path.join(_ROOT, "main.py")), *rest, *arguments]
    for note in notes:
        print(f"NOTE {note}")
    settings = [f"{name}={value}" for name, value in variables.items()]
    print(f"resnet_main.py runs: {shlex.join([*settings, 'python', *program])}", flush=True)
    os.execve(sys.executable, [sys.executable, *program], {**os.environ, **variables})


if __name__ == "__main__":
    entry.run(lambda: main(sys.argv[1:]))
