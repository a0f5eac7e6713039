"""GNMT on WMT16 English-German: MLPerf's recurrent translator, BLEU 0.24.

The recipe is MLPerf's reference at a batch of 2048, as it was run in v0.7. configs/_loop.py
has the keys that all benchmarks share. docs/gnmt.md explains the recipes.
"""

import math

import ml_collections

from configs import _loop


def get_config() -> ml_collections.ConfigDict:
    """The recipe's values and the keys of the GNMT benchmark."""
    config = _loop.get_config()
    config.benchmark = "gnmt"  # the package in benchmarks/

    # Data: text whose words are cut into pieces ("H@@ aus"), a sentence per line, one file per
    # language. Without names of text files: the records that `python -m scripts.prepare text`
    # makes.
    config.dataset = ""  # 'fake': one random batch, kept on the devices, instead of data_dir
    config.data_dir = ""  # '' = the folder in the environment variable `data_env`
    config.data_env = "MLP_PATH_GCS_NMT"  # environment variable of the folder
    config.train_source = "train.tok.clean.bpe.32000.en"  # sentences, one in a line
    config.train_target = "train.tok.clean.bpe.32000.de"  # translations of train_source
    config.eval_source = "newstest2014.tok.bpe.32000.*en"  # to translate; Google has .padded.en
    config.eval_target = "newstest2014.tok.bpe.32000.*de"  # translations of eval_source
    config.train_files = "*packed-train*,wmt32k-encoded-train-*"  # patterns of the records' names
    config.eval_files = "*-dev*,wmt32k-encoded-dev*"  # patterns for evaluation
    config.vocabulary_file = "vocab.*"  # patterns of its name
    # Reference translations as text, line by line. The first of these files that
    # exists. Without any they are decoded from the eval targets. A single name must exist.
    config.eval_references = "references.txt,newstest2014.de,wmt14-en-de.ref"
    # 0 = as many as the data hold; any other number must agree with the data. Only the pairs count
    # that training keeps, see bucket_lengths.
    config.num_train_pairs = 0
    config.num_eval_sentences = 0  # 0 = as many as the data hold
    config.vocabulary_size = 0  # 0 = as the data have it; else as Google's file, 32,316
    # Tokens that the pairs of a training batch are padded to; ends of sentences included. Each is a
    # program. Pairs with a longer side are left out.
    config.bucket_lengths = (24, 32, 40, 48)
    # Tokens that sentences are padded to; none is left out, so the last length must be enough.
    config.eval_lengths = (16, 32, 48, 150)

    # Model.
    config.num_encoder_layers = 4  # LSTMs; the first reads in both directions
    config.num_decoder_layers = 4  # LSTMs
    config.width = 1024  # of the embeddings and layers
    config.dropout = 0.2  # of each LSTM's input
    config.label_smoothing = 0.1  # the share of each target that all classes share
    config.projection_bias = True  # bias of the logits; Google's entries have none
    config.counts_eos = True  # the loss counts ends of sentences; Google's before v0.7 did not
    config.init_scale = 0.1  # bound of initial weights and biases
    config.attention_gain = 1 / math.sqrt(1024)  # norm of attention's vector at the start
    config.precision = "bfloat16"  # of activations; parameters, cells and losses are float32

    # Optimisation.
    config.train_batch_size = 2048  # pairs
    config.train_steps = "4 epochs"
    config.optimizer = "adam"
    config.base_learning_rate = 0.002
    config.warmup_steps = "200"
    config.warmup_shape = "exponential"
    # Constant for two thirds of the run, then halved four times at equal distances: the epochs of
    # the schedule are twelfths of the run, however long it is.
    config.schedule_epochs = 12
    config.learning_rate_decay_epochs = (8, 9, 10, 11)
    config.learning_rate_decay_factors = (0.5,)
    # For the gradient of the loss per pair, which is larger than the gradient per token.
    config.gradient_clip_norm = 5.0

    # Evaluation.
    config.eval_batch_size = 512  # sentences
    config.beam_size = 5  # beams of the search
    config.length_penalty = 0.6  # the power of the length that a score is divided by
    config.coverage_penalty = 0.1  # for source tokens that got little attention
    config.max_length = 150  # tokens of a translation, at most; the end of the sentence included
    config.target = 0.24  # BLEU to reach, uncased
    config.stop_at_target = True
    return config
