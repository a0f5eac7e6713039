"""Trains with the command line of the TPU tutorial's resnet_main.py.

    python resnet_main.py --data_dir=DIR --model_dir=DIR --train_batch_size=1024

The program translates the tutorial's flags, prints the command of main.py that they mean, and runs
it. Flags of main.py may stand beside them: --config.seed=1. The recipe is configs/resnet50.py
unless --config names another. docs/resnet_main.md has a table of the flags.
"""

import scripts  # isort: skip # noqa: F401 (first: a Python without the packages gets one line)

import os
import shlex
import sys
from collections.abc import Container, Sequence
from typing import NamedTuple

import yaml
from absl import flags
from etils import epath

from common import entry
from common.errors import ConfigError, one_line

_ROOT = os.path.dirname(os.path.abspath(__file__))
_RECIPE = "configs/resnet50.py"


# The flags of tensorflow/tpu's models/official/resnet/resnet_main.py of 2018 to 2026, of the copies
# in Google's MLPerf v0.5 entry, and of Paperspace/tpu-resnet; and the parameters of --config_file.
_NAMES = {
    str: """data_dir model_dir mode precision preprocessing augment_name norm_act_layer config_file
        params_override dropblock_groups bigtable_instance export_dir tpu tpu_name master
        eval_master gcp_project tpu_zone num_cores num_shards tpu_cores_per_host
        dropblock_keep_prob dropblock_size num_parallel_calls num_files_infeed
        prefetch_buffer_size num_prefetch_threads data_format bigtable_project bigtable_table
        bigtable_train_prefix bigtable_eval_prefix bigtable_column_family
        bigtable_column_qualifier iterations_per_loop min_eval_interval model_name
        inference_batch_sizes""",
    int: """train_steps train_batch_size eval_batch_size steps_per_eval log_step_count_steps
        steps_per_checkpoint resnet_size resnet_depth num_label_classes num_train_images
        num_eval_images image_size shuffle_buffer_size randaug_num_layers randaug_magnitude
        profile_every_n_steps""",
    float: """eval_timeout stop_threshold learning_rate base_learning_rate momentum weight_decay
        label_smoothing moving_average_decay poly_rate bn_momentum se_ratio drop_connect_rate
        dropout_rate""",
    bool: """use_tpu enable_lars pre_activation use_resnetd_stem resnetd_shortcut
        replace_stem_max_pool mlperf_logging prefetch_depth_auto_tune use_cache transpose_input
        use_eval_runner use_train_runner skip_host_call use_async_checkpointing
        eval_after_training export_to_tpu add_warmup_requests export_moving_average""",
}
FLAGS = {name: type_ for type_, names in _NAMES.items() for name in names.split()}

# What means the same here, with {} for the value. A flag in none of these tables has no effect.
_KEYS = """data_dir train_steps train_batch_size eval_batch_size steps_per_eval
    log_step_count_steps base_learning_rate momentum weight_decay label_smoothing
    moving_average_decay resnet_depth num_label_classes num_train_images num_eval_images image_size
    shuffle_buffer_size precision bn_momentum"""
_HERE = {
    **{name: f"--config.{name}={{}}" for name in _KEYS.split()},
    "model_dir": "--workdir={}",
    # Paperspace's copy evaluates each checkpoint.
    "steps_per_checkpoint": "--config.steps_per_checkpoint={0} --config.steps_per_eval={0}",
    "stop_threshold": "--config.target={} --config.stop_at_target=True",
    "learning_rate": "--config.base_learning_rate={}",
    "resnet_size": "--config.resnet_depth={}",
    "se_ratio": "--config.squeeze_excite={}",
    "drop_connect_rate": "--config.drop_path={}",
    "dropout_rate": "--config.dropout={}",
}
_VALUES = {
    "mode=train_and_eval": "--mode=train_and_eval",
    "mode=in_memory_eval": "--mode=train_and_eval",
    "mode=train": "--mode=train",
    "mode=eval": "--mode=eval --watch",
    "use_tpu=False": "JAX_PLATFORMS=cpu",
    "pre_activation=True": "--config.resnet_version=2",
    "pre_activation=False": "--config.resnet_version=1.5",
    "replace_stem_max_pool=True": "--config.max_pool=conv",
    "replace_stem_max_pool=False": "--config.max_pool=same",
    "preprocessing=resnet": "--config.preprocessing=exact",
    "preprocessing=vgg": "--config.preprocessing=vgg --config.input_spec=vgg",
    # What the program does anyway.
    **dict.fromkeys(["use_tpu=True", "enable_lars=False", "norm_act_layer=bn_relu"], ""),
    **dict.fromkeys(["use_resnetd_stem=False", "resnetd_shortcut=False"], ""),
    **dict.fromkeys(["mlperf_logging=False", "profile_every_n_steps=0"], ""),
}
_INSTEAD = {  # of another value
    "mode": "use train_and_eval, train or eval",
    "preprocessing": "use resnet or vgg",
    "augment_name": "AutoAugment is not implemented; use randaugment, or "
    "--config.augmentation=trivialaugment",
    "norm_act_layer": "EvoNorm is not implemented; use bn_relu",
    "use_resnetd_stem": "--config.deep_stem=True has both this and resnetd_shortcut",
    "resnetd_shortcut": "--config.deep_stem=True has both this and use_resnetd_stem",
    "dropblock_groups": "DropBlock is not implemented; --config.drop_path is similar",
    "bigtable_instance": "Bigtable is not read; write the records to files and give --data_dir=DIR",
    "mlperf_logging": "bash run_and_time.sh writes MLPerf's logs",
    "profile_every_n_steps": "--config.profile_steps=BEGIN:END traces these steps once",
    "export_dir": "train without it, and then: python main.py --mode=export --format=savedmodel "
    "--workdir=WORKDIR --out={}",
}


class Translation(NamedTuple):
    """What flags of the tutorial mean here."""

    arguments: list[str]  # flags of main.py
    variables: dict[str, str]  # of the environment
    notes: list[str]  # a line for each flag that has no effect
    others: list[str]  # the words that are no flags of the tutorial


def translate(words: Sequence[str], names: Container[str] = FLAGS) -> Translation:
    """Translates a command line without the program; flags not in `names` are among the others.

    ConfigError has a line for each value that is of the wrong kind or has no equivalent here.
    """
    values, others = _parse(words, names)
    parameters = _parameters(values.pop("config_file", ""), values.pop("params_override", ""))
    values = _parse(parameters, FLAGS)[0] | values  # the command line overrides the files
    combined = _combined(values)
    arguments, notes, mistakes = [], [], []
    for name, value in values.items():
        here = _VALUES.get(f"{name}={value}", _HERE.get(name))
        if here is not None:
            arguments += [word.format(value) for word in here.split()]
        elif name in _INSTEAD:
            mistakes.append(f"--{name}={value}: {_INSTEAD[name].format(value)}")
        else:
            notes.append(f"--{name}={value} has no effect here")
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    arguments += combined
    variables = dict(word.split("=", 1) for word in arguments if not word.startswith("--"))
    last = {word.partition("=")[0]: word for word in arguments if word.startswith("--")}
    return Translation([*last.values()], variables, notes, others)


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
    for name in filter(names.__contains__, FLAGS):
        define[FLAGS[name]](name, None, "", flag_values=parser)
    try:
        others = parser(["resnet_main.py", *words], known_only=True)[1:]
    except flags.Error as error:
        raise ConfigError(one_line(error)) from error
    values = {name: parser[name].value for name in FLAGS if name in parser}
    return {name: str(value) for name, value in values.items() if value not in (None, "")}, others


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
    unknown = [name for name in parameters if name not in FLAGS]
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is not a parameter of the tutorial's resnet_main.py")
    return [f"--{name}={value}" for name, value in parameters.items() if value is not None]


def _combined(values: dict[str, str]) -> list[str]:
    """Takes the flags that have an effect only together; returns what they mean here.

    LARS has the rates and the warm-up of the tutorial's lars_util.py.
    """
    arguments = []
    if values.get("mode") == "eval" and "eval_timeout" in values:
        arguments.append(f"--eval_timeout={values.pop('eval_timeout')}")
    if values.get("use_resnetd_stem") == values.get("resnetd_shortcut") == "True":
        del values["use_resnetd_stem"], values["resnetd_shortcut"]
        arguments.append("--config.deep_stem=True")
    if values.get("augment_name") == "randaugment":
        del values["augment_name"]
        layers, magnitude = values.pop("randaug_num_layers", 2), values.pop("randaug_magnitude", 9)
        arguments.append(f"--config.augmentation=randaugment:{layers}x{magnitude}")
    if values.get("enable_lars") == "True":
        del values["enable_lars"]
        batch = int(values.get("train_batch_size", 1024))
        limits = ((16384, 10.0, 5), (32768, 25.0, 5), (65536, 32.0, 14), (float("inf"), 35.6, 40))
        rate, epochs = next((rate, epochs) for limit, rate, epochs in limits if batch < limit)
        arguments += [
            "--config.optimizer=lars",
            "--config.learning_rate_schedule=polynomial",
            "--config.learning_rate_per=0",
            f"--config.base_learning_rate={values.pop('poly_rate', rate)}",
            f"--config.warmup_steps={epochs} epochs",
        ]
    return arguments


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
        arguments, variables, notes, others = translate(words)
    except ConfigError as error:
        sys.exit("\n".join(f"ERROR: {line}" for line in str(error).splitlines()))
    if not any(word.split("=")[0].lstrip("-") == "config" for word in others):
        others = [f"--config={os.path.relpath(os.path.join(_ROOT, _RECIPE))}", *others]
    program = [os.path.relpath(os.path.join(_ROOT, "main.py")), *others, *arguments]
    for note in notes:
        print(f"NOTE {note}")
    settings = [f"{name}={value}" for name, value in variables.items()]
    print(f"resnet_main.py runs: {shlex.join([*settings, 'python', *program])}", flush=True)
    os.execve(sys.executable, [sys.executable, *program], {**os.environ, **variables})


if __name__ == "__main__":
    entry.run(lambda: main(sys.argv[1:]))
