"""Mask R-CNN with ResNet-50 and a feature pyramid on COCO: MLPerf's benchmark from v0.5 on.

configs/_loop.py has the keys that all benchmarks share. docs/mask_rcnn.md explains the recipes.
"""

import ml_collections

from configs import _loop


def get_config() -> ml_collections.ConfigDict:
    """The recipe's values and the keys of the Mask R-CNN benchmark."""
    config = _loop.get_config()
    config.benchmark = "mask_rcnn"

    # Data: records that `python -m scripts.prepare coco --masks` makes.
    config.data_dir = ""  # '' = the folder in the environment variable below
    config.data_env = "MLP_PATH_GCS_MASKRCNN"
    config.train_files = "train-*"
    config.eval_files = "val-*"
    # COCO's own file of the evaluation's true boxes and outlines; the score is computed with it.
    config.eval_annotations = "instances_val*.json,raw-data/annotations/instances_val*.json"
    # 0 = as many as the data hold. Another number must be that of the data.
    config.num_train_images = 0  # with boxes; others are left out
    config.num_eval_images = 0
    config.num_classes = 0  # without the background; 0 = as many as the data have, else COCO's 80
    config.class_numbers = "order"  # class k is the k-th category; 'ids': the category with id k
    config.max_boxes = 100  # of an image in training; of more, the largest are taken
    # An image is resized to `image_short` on its short side, or to less if the long side would
    # exceed `image_long`. Then it is padded to `image_shape` (height, width), or if it is higher
    # than wide, to the same turned round. The images of a batch have one orientation.
    config.image_short = 800
    config.image_long = 1333
    config.image_shape = (832, 1344)
    config.mask_size = 112  # of a true mask, which spans the box of its object
    config.random_flip = True
    config.shuffle_buffer_size = 4096  # images held for shuffling, over all hosts
    config.input_streams = 32  # a multiple of every number of hosts the run will have

    # Model.
    config.resnet_stages = (3, 4, 6, 3)  # blocks per stage: ResNet-50
    config.resnet_bottleneck = True
    config.num_filters = 64
    config.max_pool = "same"  # as configs/resnet50.py; 'torch' for weights from PyTorch
    config.space_to_depth = False
    config.freeze = "stem, stage1"  # these layers keep the values of `init_from`
    # "frozen": BatchNorm keeps the statistics, scales and shifts of `init_from`; or "batch".
    config.bn_statistics = "frozen"
    config.bn_epsilon = 1e-5  # added to the variance
    config.bn_momentum = 0.9  # of the running statistics, with "batch"
    config.precision = "bfloat16"  # of activations; parameters, boxes and losses are float32
    config.pyramid_levels = (2, 3, 4, 5, 6)  # level l has a cell for 2**l pixels
    config.pyramid_filters = 256
    # Proposals: anchors of a level have sides of `anchor_scale` cells, and these heights by widths.
    # They lie around the centres of the cells; or, as torchvision's, around the first 'corners'.
    config.anchor_grid = "centres"
    config.anchor_scale = 8.0
    config.anchor_ratios = (0.5, 1.0, 2.0)
    config.anchor_samples = 256  # of an image, that the loss counts
    config.anchor_positive_share = 0.5  # of these, at most
    config.anchor_positive_iou = 0.7
    config.anchor_negative_iou = 0.3
    config.proposals_before_nms = 2000  # of a level, to train
    config.proposals_after_nms = 1000  # of an image
    config.eval_proposals_before_nms = 1000
    config.eval_proposals_after_nms = 1000
    config.proposal_nms_iou = 0.7
    # Regions: proposals and true boxes that the heads are trained on.
    config.region_samples = 512  # of an image
    config.region_positive_share = 0.25
    config.region_iou = 0.5  # of a positive region with a true box
    config.region_scale = 224.0  # pixels: a square region of this side is taken from level 4
    config.box_pool = 7  # cells of a region, high and wide
    config.box_features = (1024, 1024)
    config.mask_pool = 14
    config.mask_features = (256, 256, 256, 256)

    # Optimisation: the rules' 0.02 per 16 images, and their drops, for 16 images.
    config.train_batch_size = 16
    config.train_steps = "13 epochs"
    config.weight_decay = 1e-4  # of kernels; biases have none, and the double rate
    config.base_learning_rate = 0.02
    # True: `init_from` has other classes, so of the last layers only what does not depend on the
    # classes is taken.
    config.new_classes = False
    config.head_learning_rate = 1.0  # multiplies the rate of the layers that depend on the classes
    config.learning_rate_per = 16  # images
    config.warmup_steps = "500"
    config.warmup_from = 0.0067  # the reference's third of the peak
    config.learning_rate_decay_steps = "960000, 1280000 examples"  # as many for other batches
    config.init_env = "MLP_GCS_RESNET_CHECKPOINT"  # a ResNet-50

    # Evaluation.
    config.eval_batch_size = 16
    config.min_score = 0.05  # detections with a lower score are dropped
    config.nms_iou = 0.5  # of two boxes of a class that overlap so much, the better one stays
    config.max_detections = 100  # of an image
    # Of a class, the best detections that take part in the suppression; 0 = 2 * max_detections.
    config.class_candidates = 0
    config.target = 0.377  # mAP of boxes
    config.mask_target = 0.339  # mAP of masks, in the same evaluation
    config.stop_at_target = True
    return config
