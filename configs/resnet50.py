"""ResNet-50 on ImageNet: 90 epochs of SGD at a batch of 1024, the TensorFlow TPU tutorial's recipe.

Override any key with --config.KEY=VALUE; configs/_loop.py has the keys that all benchmarks share.
"""

import ml_collections
from ml_collections import config_dict

from configs import _loop


def get_config() -> ml_collections.ConfigDict:
    """The recipe's values and the keys of the ResNet benchmark."""
    config = _loop.get_config()
    config.benchmark = "resnet"  # the package in benchmarks/

    # Data: 'records', TFRecords in the ImageNet schema; or 'tfds:NAME', a prepared TFDS set, whose
    # data_dir is TFDS's.
    config.dataset = "records"  # 'fake': one random batch, kept on the devices, instead of data_dir
    # '' = the folder in the environment variable `data_env`. Where that is not set, either:
    # $TPU_MODEL_DIR/input_data, else the public random images in `data_fallback`.
    config.data_dir = ""
    config.data_env = "MLP_PATH_GCS_IMAGENET"  # environment variable of the folder
    config.data_fallback = "gs://cloud-tpu-test-datasets/fake_imagenet"  # if nothing else is named
    config.train_files = "train-*,train/train-*"  # patterns of the records' names
    config.eval_files = "validation-*,validation/validation-*"  # patterns for evaluation
    # 0 = as many as the data hold; any other number must agree with the data.
    config.num_train_images = 0
    config.num_eval_images = 0  # the same
    # 0 = as many as the data declare (manifest.json, TFDS), else 1000. 1001: the stored labels, in
    # which 0 is the background.
    config.num_label_classes = 0
    # 'several': a picture has any number of labels; each is a question of its own. 'one':
    # exactly one; 'auto': as the data declare (manifest.json), else 'one'.
    config.labels = "auto"
    config.image_size = 224  # side in pixels
    # Progressive resizing: pairs of fraction of the run and size. ((0, 128), (0.4, 160)) has 128
    # pixels in the first 40 % of the steps. (): always image_size. One more program per size.
    config.image_sizes = ()
    config.eval_image_size = 0  # pixels of evaluation, prediction and export; 0 = image_size
    # True: evaluation and prediction average logits of image and mirror. It takes twice
    # the time. Exported models do not.
    config.eval_flip = False
    # How training images are cropped and resized. 'exact': as in the tutorial. 'fast': more images
    # per second, docs/performance.md. 'vgg': the shorter side becomes 256 to 512, then a random
    # square is cropped (crop_area_min has no effect), as in configs/resnet50_v2.py.
    config.preprocessing = "exact"
    # How images are prepared for evaluation, and normalised. 'tensorflow', another name in
    # common/images/input_spec.py, or a JSON object with its fields.
    config.input_spec = "tensorflow"
    # True: training decodes JPEGs above a megapixel at a part of their size. It is 1/2, 1/4 or 1/8
    # as long as a crop then has the pixels that it is resized to (docs/data.md).
    config.reduced_decoding = False
    config.crop_area_min = 0.08  # training crops take this share of the image or more
    config.random_flip = True  # training mirrors half of the images
    # > 1: repeated augmentation. Each training image fills so many rows of a batch, each with its
    # own crop and flip. The steps of an epoch see one in so many images.
    config.repeats = 1
    config.shuffle_buffer_size = 16384  # examples held for shuffling, over all hosts
    config.input_streams = 64  # a multiple of every number of hosts the run will have

    # Model.
    config.resnet_depth = 50  # 18, 34, 50, 101, 152 or 200
    # '1': bottlenecks stride in their first convolution, as in Keras; '1.5': in their second. '2':
    # pre-activation, see configs/resnet50_v2.py.
    config.resnet_version = "1.5"
    # True: ResNet-18 and 34 with a projection in their first block; as the TPU tutorial has them.
    config.stage1_projection = False
    config.deep_stem = False  # True: ResNet-D, a stem of three convolutions and mean shortcuts
    config.squeeze_excite = 0.0  # 0.0625: SE-ResNet, with layers of this share of the channels
    config.blur_pool = False  # True: blur before convolutions with a stride; needs 'plain' below
    # Padding of the max-pool; 'torch': as torchvision, timm and Keras; 'conv': no max-pool, but a
    # convolution with a stride, as ResNet-RS.
    config.max_pool = "same"
    config.num_filters = 64  # channels of the stem
    config.precision = "bfloat16"  # of activations; parameters and statistics are float32
    config.space_to_depth = False  # True: the stem reads blocks of 2 x 2 pixels
    # Devices in a group of synchronised BatchNorm, 0 for all; or "64/4096": as many devices
    # as have 64 of the 4096 images of a forward pass, so that their number does not matter.
    config.bn_span = config_dict.FieldReference(1, field_type=object)  # a number or text
    config.bn_momentum = 0.9  # of BatchNorm's running statistics
    # 'frozen': training normalises with the statistics of `init_from`; they never change.
    # 'auto': that, for fewer than 2,000 training images or fewer than 10 that share statistics.
    config.bn_statistics = "batch"
    # 'gram': the same as 'plain' with less memory traffic (docs/performance.md). Other
    # versions than '1.5', deep_stem, squeeze_excite and max_pool='conv' have the 'plain' form only,
    # and CPUs and GPUs train in it.
    config.batch_norm = "gram"
    # 'pallas': one Pallas kernel per block boundary in the backward pass. ResNets of bottlenecks
    # with 'gram' have it in their first two stages, on TPUs from v4 on. The same arrays and
    # checkpoints. No chip has run it here: docs/performance.md.
    config.kernels = "xla"

    # Optimisation.
    config.nesterov = True
    config.weight_decay = 1e-4
    config.label_smoothing = 0.0  # the share of each target that all classes share
    # Or 'bce_sum', 'bce_mean', 'bce_binary': binary cross-entropy; see benchmarks/resnet/losses.py.
    config.loss = "softmax"
    # 'light', 'medium' or 'strong': presets; see benchmarks/resnet/settings.py; other keys that are
    # not 0 keep their values. Or 'randaugment:2x9', 'randaugment:2x6:0.5' (timm's) or
    # 'trivialaugment', see benchmarks/resnet/input/augment.py. '' is none.
    config.augmentation = ""
    # > 0: mixes pairs of images with shares from Beta(alpha, alpha). With both, half of them each.
    config.mixup = 0.0
    config.cutmix = 0.0  # > 0: puts a window of another image into each
    config.random_erasing = 0.0  # share of images of which a window is erased
    config.drop_path = 0.0  # stochastic depth: share of rows that skip the last block
    config.dropout = 0.0  # share of features dropped before the head
    config.head_bias_from_classes = False  # begin with a bias of -log(classes)
    # 'auto': rare classes count more; the loss of an image is divided by its class's share of the
    # training images. The weights have the mean 1 over them. The numbers are manifest.json's;
    # without it, and for a part of the data, the records are read through once to count.
    config.class_weights = ""
    config.head_learning_rate = 1.0  # multiplies the rate of the layers that depend on the classes
    config.learning_rate_per = 256  # images
    config.warmup_epochs = 5.0
    config.learning_rate_decay_epochs = (30, 60, 80)
    config.end_learning_rate = 1e-4  # only 'polynomial': the last rate

    config.target = 0.76  # top-1 to reach
    return config
