"""The flags of the TPU tutorial, as resnet_main.py takes them and as main.py answers them."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags
from ml_collections import config_flags

import main
import resnet_main
from commands import recipe
from common.errors import ConfigError
from configs import resnet50
from engine.plan import read_settings
from tests.test_main import TINY, environment, fails_with, run
from tests.torture import xla_flags

ROOT = Path(__file__).parents[1]

# The flags that each source defines, with a value that a user may give. They were read in
# tensorflow/tpu at 7dc921f, mlcommons/training_results_v0.5 at c71f2e7 (v0.5.0/google, two copies)
# and Paperspace/tpu-resnet at dcd12be.
SOURCES = {
    "tensorflow/tpu": """
      tpu=t gcp_project=p tpu_zone=z eval_master=m use_tpu=true data_dir=d model_dir=m
      train_batch_size=8 train_steps=9 eval_batch_size=8 skip_host_call=true
      iterations_per_loop=100 precision=float32 config_file=configs.yaml params_override=momentum=0
      eval_after_training=true resnet_depth=34 num_train_images=9 num_eval_images=9
      num_label_classes=10 data_format=channels_last transpose_input=true use_cache=true
      image_size=32 dropblock_groups=3,4 dropblock_keep_prob=0.9 dropblock_size=7
      pre_activation=true norm_act_layer=bn_relu profile_every_n_steps=0 mode=train steps_per_eval=3
      eval_timeout=60 num_parallel_calls=8 num_cores=8 bigtable_project=p bigtable_instance=i
      bigtable_table=t bigtable_train_prefix=p bigtable_eval_prefix=p bigtable_column_family=f
      bigtable_column_qualifier=q export_dir=e export_to_tpu=true base_learning_rate=0.1
      momentum=0.8 weight_decay=1e-4 label_smoothing=0.1 enable_lars=true poly_rate=3
      use_async_checkpointing=true log_step_count_steps=64 augment_name=randaugment
      randaug_num_layers=2 randaug_magnitude=9 add_warmup_requests=true model_name=resnet
      inference_batch_sizes=8 export_moving_average=true""",
    "MLPerf v0.5": """
      use_tpu=true tpu=t gcp_project=p tpu_zone=z data_dir=d model_dir=m resnet_depth=50
      mode=in_memory_eval train_steps=9 train_batch_size=8 eval_batch_size=8 num_train_images=9
      num_eval_images=9 num_label_classes=10 steps_per_eval=3 eval_timeout=9 skip_host_call=true
      iterations_per_loop=1251 num_parallel_calls=64 num_cores=8 precision=bfloat16
      base_learning_rate=0.1 momentum=0.9 weight_decay=1e-4 label_smoothing=0
      data_format=channels_last transpose_input=true export_dir=e export_to_tpu=false
      enable_lars=false poly_rate=0
      use_cache=true use_async_checkpointing=false log_step_count_steps=64 stop_threshold=0.749
      use_eval_runner=true use_train_runner=true tpu_cores_per_host=8 num_prefetch_threads=16
      prefetch_depth_auto_tune=true mlperf_logging=true""",
    "Paperspace": """
      use_tpu=true gcp_project=p tpu_zone=z tpu_name=t master=grpc://10.0.0.2:8470 data_dir=d
      model_dir=m resnet_size=50 train_steps=9 train_batch_size=8 eval_batch_size=8 num_shards=8
      mode=train_and_eval iterations_per_loop=-1 shuffle_buffer_size=1000 steps_per_checkpoint=5
      min_eval_interval=180 eval_timeout=60 num_files_infeed=8 num_parallel_calls=64
      prefetch_buffer_size=8000000 learning_rate=0.1 preprocessing=vgg""",
}
# Those that have no counterpart; `resnet_main` says what to do.
REFUSED = {"dropblock_groups", "bigtable_instance", "export_dir", "mlperf_logging"}
TYPED = {
    word.split("=")[0]: word for source in SOURCES.values() for word in source.split()
}  # the last value of each


def settings(arguments):
    """What main.py reads from arguments; refuses what it would refuse."""
    config = resnet50.get_config()
    parser, words = flags.FlagValues(), ["main.py", *arguments]
    config_flags.DEFINE_config_dict("config", config, flag_values=parser, sys_argv=words)
    rest = parser(words, known_only=True)[1:]
    names = [word.lstrip("-").partition("=")[0] for word in rest]
    assert all(name in main.flags.FLAGS for name in names), rest
    return read_settings(config.lock())


@pytest.mark.parametrize("source", SOURCES)
def test_no_flag_of_a_source_is_unknown(source):
    for number, word in enumerate(SOURCES[source].split()):
        name, prefix = word.split("=")[0], "-" * (1 + number % 2)
        if name in {*REFUSED, "config_file"}:
            with pytest.raises(ConfigError, match=name if name in REFUSED else "configs.yaml"):
                resnet_main.translate([prefix + word])
            continue
        translation = resnet_main.translate([prefix + word])
        assert translation.others == []
        settings(translation.arguments)


@pytest.mark.parametrize("name", [name for name in TYPED if name not in main.flags.FLAGS])
def test_what_main_answers_to_a_flag_of_the_tutorial(name):
    words = ["main.py", "--config=configs/resnet50.py", f"--{TYPED[name]}"]
    error = flags.UnrecognizedFlagError(name, "x")
    line = recipe.explain(words, error, [*resnet50.get_config()], resnet_main.hint)
    assert f"--{name}" in line or name == "config_file"
    assert "docs/resnet_main.md" in line and "\n" not in line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "--master=g --data_dir=d --model_dir=m --train_batch_size=1024 --eval_batch_size=128",
            "--config.data_dir=d --workdir=m --config.train_batch_size=1024 "
            "--config.eval_batch_size=128",
        ),
        (
            "--train_batch_size 8 --train_steps=2",
            "--config.train_steps=2 --config.train_batch_size=8",
        ),
        ("--master= --data_dir=", ""),
        ("--mode=eval --eval_timeout=9", "--mode=eval --watch --eval_timeout=9.0"),
        ("--mode=train --eval_timeout=9", "--mode=train"),
        (
            "--resnet_size=18 --learning_rate=1",
            "--config.resnet_depth=18 --config.base_learning_rate=1.0",
        ),
        ("--nopre_activation", "--config.resnet_version=1.5"),
        ("--augment_name=randaugment", "--config.augmentation=randaugment:2x9"),
        (
            "--augment_name=randaugment --randaug_num_layers=3 --randaug_magnitude=4",
            "--config.augmentation=randaugment:3x4",
        ),
        ("--stop_threshold=0.7", "--config.target=0.7 --config.stop_at_target=True"),
        (
            "--params_override=train_steps=3,resnet_depth=18 --train_steps=4",
            "--config.train_steps=4 --config.resnet_depth=18",
        ),
        (
            "--params_override='{se_ratio: 0.25, dropout_rate: null}'",
            "--config.squeeze_excite=0.25",
        ),
        (
            "--params_override=use_resnetd_stem=True,resnetd_shortcut=True",
            "--config.deep_stem=True",
        ),
        ("--poly_rate=3", ""),
    ],
)
def test_translations(words, expected):
    translation = resnet_main.translate(shlex.split(words))
    assert translation.arguments == expected.split()


@pytest.mark.parametrize(
    ("batch", "rate", "warmup"),
    [(4096, 10.0, 5), (16384, 25.0, 5), (32768, 32.0, 14), (65536, 35.6, 40)],
)
def test_lars_has_the_rates_of_the_tutorial(batch, rate, warmup):
    words = ["--enable_lars", f"--train_batch_size={batch}"]
    recipe = settings(resnet_main.translate(words).arguments).config
    expected = {"optimizer": "lars", "base_learning_rate": rate, "learning_rate_per": 0}
    expected |= {"learning_rate_schedule": "polynomial", "warmup_steps": f"{warmup} epochs"}
    assert {key: recipe[key] for key in expected} == expected
    faster = settings(resnet_main.translate([*words, "--poly_rate=3"]).arguments)
    assert faster.config["base_learning_rate"] == 3


def test_a_config_file_of_the_tutorial(tmp_path):
    """The parameters of tensorflow/tpu's resnetrs50_i160.yaml."""
    path = tmp_path / "rs.yaml"
    path.write_text(
        "augment_name: randaugment\nbase_learning_rate: 0.1\ndata_format: channels_last\n"
        "drop_connect_rate: null\ndropout_rate: 0.25\nimage_size: 160\nrandaug_magnitude: 10\n"
        "randaug_num_layers: 2\nreplace_stem_max_pool: True\nresnetd_shortcut: True\n"
        "se_ratio: 0.25\ntrain_steps: 109475\nuse_resnetd_stem: True\nuse_tpu: True\n"
        "weight_decay: 4.0e-05\nmoving_average_decay: 0.9999\nbn_momentum: 0\n"
    )
    words = resnet_main.translate([f"--config_file={path}", "--train_steps=9"]).arguments
    recipe = settings(words).config
    expected = {"deep_stem": True, "max_pool": "conv", "squeeze_excite": 0.25, "dropout": 0.25}
    expected |= {"augmentation": "randaugment:2x10", "train_steps": "9", "weight_decay": 4e-5}
    expected |= {"moving_average_decay": 0.9999, "bn_momentum": 0.0, "image_size": 160}
    assert {key: recipe[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("word", "message"),
    [
        *((word, word) for word in ("--train_batch_size=many", "--poly_rate=x")),
        *((word, word) for word in ("--momentum=x", "--use_tpu=perhaps", "--mode=test")),
        ("--preprocessing=x", "--preprocessing=x"),
        ("--config_file=/nowhere.yaml", "/nowhere.yaml"),
        ("--model_dir", "--model_dir"),
        ("--augment_name=autoaugment", "AutoAugment"),
        ("--norm_act_layer=evonorm_s0", "EvoNorm"),
        ("--profile_every_n_steps=5", "--config.profile_steps=BEGIN:END"),
        ("--export_dir=e", "--mode=export --format=savedmodel --workdir=WORKDIR --out=e"),
        ("--params_override=use_resnetd_stem=True", "--config.deep_stem=True has both"),
        ("--params_override=foo=3", "'foo' is not a parameter"),
        ("--params_override={a: [}", "holds no parameters"),
    ],
)
def test_a_value_without_a_counterpart_is_one_line(word, message):
    with pytest.raises(ConfigError) as caught:
        resnet_main.translate([word])
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--train_batch_size=1024", "--data_dir=d", "--iterations_per_loop=9"],
            [
                "--config.data_dir=d --config.train_batch_size=1024 ",
                "--iterations_per_loop=9 has no effect here",
            ],
        ),
        (["--num_filters=8"], ["--num_filters is a key of the recipe: give --config.num_filters="]),
    ],
)
def test_main_names_the_flags_to_give_instead(arguments, words):
    fails_with(run("--workdir=w", *arguments), *words)


def test_the_table_of_the_docs_has_every_flag():
    page = (ROOT / "docs" / "resnet_main.md").read_text().partition("## Old flag")[2]
    old = [row.split("|")[1] for row in page.splitlines() if row.startswith("| `")]
    names = {name for cell in old for name in re.findall(r"`?(?:--)?([a-z_]+)(?:=\w+)?[`  ]", cell)}
    assert names - {"and"} == resnet_main.FLAGS.keys()


@pytest.mark.long
def test_the_command_line_of_the_tutorial_trains(tiny_records, tmp_path):
    """From another folder, with the variables of the seed's README."""
    keys = ("num_filters", "input_streams", "shuffle_buffer_size")
    words = ["--master=$TPU_GRPC_URL", f"--data_dir={tiny_records}", "--model_dir=$TPU_MODEL_DIR"]
    words += ["--train_batch_size=16", "--eval_batch_size=8", "--train_steps=2", "--resnet_size=18"]
    words += ["--num_label_classes=4", "--config.image_size=16", "--mode=train"]
    words += [f"--config.{key}={TINY[key]}" for key in keys]
    line = f"{shlex.quote(sys.executable)} {ROOT / 'resnet_main.py'} {' '.join(words)}"
    env = environment(TPU_GRPC_URL="grpc://10.0.0.2:8470", TPU_MODEL_DIR=str(tmp_path / "model"))
    env["XLA_FLAGS"] = xla_flags(1)  # programs for one device compile faster
    done = subprocess.run(line, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "NOTE --master=grpc://10.0.0.2:8470 has no effect here" in done.stdout
    assert "2 steps of 16 images" in done.stdout and "finished: step 2 of 2" in done.stdout
    assert (tmp_path / "model" / "checkpoints" / "2").exists()
