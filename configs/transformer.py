"""The Transformer (big) on WMT English-German: MLPerf's translation benchmark, BLEU 0.25.

The recipe is Google's v4-16 entry of MLPerf v0.7. configs/_loop.py has the keys that all benchmarks
share. docs/transformer.md explains the recipes.
"""

import ml_collections

from configs import _loop


def get_config() -> ml_collections.ConfigDict:
    """The recipe's values and the keys of the Transformer benchmark."""
    config = _loop.get_config()
    config.benchmark = "transformer"  # the package in benchmarks/

    # Data: records that `python -m scripts.prepare text` makes, or Google's.
    config.dataset = ""  # 'fake': one random batch, kept on the devices, instead of data_dir
    config.data_dir = ""  # '' = the folder in the environment variable `data_env`
    config.data_env = "MLP_PATH_GCS_TRANSFORMER"  # environment variable of the folder
    config.train_files = "*packed-train*,wmt32k-encoded-train-*"  # patterns of the records' names
    config.eval_files = "*-dev*,wmt32k-encoded-dev*"  # patterns for evaluation
    config.vocabulary_file = "vocab.*"  # patterns of its name
    # Text files of the sentences to evaluate. Their true translations, line by line: the first two
    # files of the same name, such as newstest2014.en and .de. Without them the eval records are
    # evaluated; their translations are in the first of eval_references, else in the records. Where
    # a key has a single name, that file is taken and must exist; '' is none.
    config.eval_source = "wmt14-en-de.src,newstest2014.en"
    config.eval_references = "references.txt,wmt14-en-de.ref,newstest2014.de"  # of eval_source
    # 0 = as many as the data hold; any other number must agree with the data.
    config.num_train_rows = 0
    config.num_eval_sentences = 0  # 0 = as many as the data hold
    config.vocabulary_size = 0  # 0 = as the data have it; else as Google's file, 33,708
    config.row_length = 256  # tokens of a training row, on either side
    config.eval_lengths = (32, 64, 128)  # tokens that sentences are padded to; each is a program
    config.shuffle_buffer_size = 65536  # examples held for shuffling, over all hosts
    config.input_streams = 64  # a multiple of every number of hosts the run will have

    # Model.
    config.num_layers = 6  # of the encoder, and of the decoder
    config.width = 1024  # of the embeddings and layers
    config.mlp_width = 4096  # of the feed-forward layers
    config.num_heads = 16  # of each attention
    config.variant = "tensor2tensor"  # or 'marian': post-norm, with biases, as OPUS-MT's models
    config.activation = "relu"  # or 'swish', 'gelu'
    config.dropout = 0.1  # share of activations that training drops
    config.label_smoothing = 0.1  # the share of each target that all classes share
    config.precision = "bfloat16"  # of activations; parameters, norms and losses are float32
    config.remat = False  # compute activations again in the backward pass; it saves memory

    # Optimisation.
    config.train_batch_size = 512  # rows
    config.train_steps = "6 epochs"
    config.optimizer = "adam"
    config.adam_beta2 = 0.98
    config.adam_epsilon = 1e-9
    config.init_required = False  # True: a run without `init_from` is refused
    config.learning_rate_schedule = "rsqrt"
    config.base_learning_rate = 1.875 / 32  # of width 1024: 1.875 / sqrt(1024)
    config.warmup_steps = "1107"
    config.gradient_precision = "bfloat16"  # as in all of Google's entries

    # Evaluation.
    config.eval_batch_size = 512  # sentences
    config.beam_size = 4  # beams of the search
    config.length_penalty = 0.6  # the power of the length that a score is divided by
    config.extra_length = 50  # tokens that a translation may be longer than its source
    config.target = 0.25  # BLEU to reach, uncased
    config.stop_at_target = True
    return config
