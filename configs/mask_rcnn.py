"""Mask R-CNN with ResNet-50 and a feature pyramid on COCO: MLPerf's benchmark from v0.5 on.

configs/_detection.py has the keys of both detectors, configs/_loop.py the keys of all benchmarks.
docs/mask_rcnn.md explains the recipes.
"""

import ml_collections

from configs import _detection


def get_config() -> ml_collections.ConfigDict:
    """The recipe's values and the keys of the Mask R-CNN benchmark."""
    config = _detection.get_config()
    config.benchmark = "mask_rcnn"  # the package in benchmarks/

    # Data.
    config.data_env = "MLP_PATH_GCS_MASKRCNN"  # environment variable of the folder
    # An image is resized to `image_short` pixels on its short side. It is less if the long side
    # would exceed `image_long`. The images of a batch have one orientation.
    config.image_short = 800  # pixels of the short side
    config.image_long = 1333  # the most for the long side
    config.image_shape = (832, 1344)  # padded to this height and width; a high image: turned
    config.mask_size = 112  # of a true mask, which spans the box of its object
    config.shuffle_buffer_size = 4096  # examples held for shuffling, over all hosts
    config.input_streams = 32  # a multiple of every number of hosts the run will have

    # Model.
    config.resnet_stages = (3, 4, 6, 3)  # blocks of each stage; ResNet-50
    config.resnet_bottleneck = True  # False: basic blocks
    config.space_to_depth = False  # True: the stem reads blocks of 2 x 2 pixels
    config.freeze = "stem, stage1"  # these layers keep the values of `init_from`
    # 'frozen': training normalises with the statistics of `init_from`; they never change,
    # nor do scales and shifts. Or 'batch'.
    config.bn_statistics = "frozen"
    config.bn_epsilon = 1e-5  # added to the variance
    config.pyramid_levels = (2, 3, 4, 5, 6)  # level l has a cell for 2**l pixels
    config.pyramid_filters = 256  # channels
    # Anchors lie around the centres of the cells; or, as torchvision's, the first 'corners'.
    config.anchor_grid = "centres"
    config.anchor_scale = 8.0  # side of an anchor in cells of its level
    config.anchor_ratios = (0.5, 1.0, 2.0)  # heights by widths
    config.anchor_samples = 256  # anchors of an image that the loss counts
    config.anchor_positive_share = 0.5  # of these, at most
    config.anchor_positive_iou = 0.7  # with a true box, or more
    config.anchor_negative_iou = 0.3  # or less
    config.proposals_before_nms = 2000  # of a level, to train
    config.proposals_after_nms = 1000  # of an image
    config.eval_proposals_before_nms = 1000  # of a level, to evaluate
    config.eval_proposals_after_nms = 1000  # of an image
    config.proposal_nms_iou = 0.7  # as nms_iou
    config.region_samples = 512  # the heads are trained on so many proposals and true boxes
    config.region_positive_share = 0.25  # of these, at most
    config.region_iou = 0.5  # with a true box, of a positive region
    config.region_scale = 224.0  # a square region with this side is taken from level 4
    config.box_pool = 7  # cells of a region, high and wide
    config.box_features = (1024, 1024)  # widths of the layers
    config.mask_pool = 14  # cells of a region for the mask
    config.mask_features = (256, 256, 256, 256)  # channels of the layers

    # Optimisation: the rules' 0.02 per 16 images, and their drops, for 16 images.
    config.train_batch_size = 16
    config.train_steps = "13 epochs"
    config.weight_decay = 1e-4  # of kernels; biases have none, and the double rate
    config.base_learning_rate = 0.02
    config.learning_rate_per = 16  # images
    config.warmup_steps = "500"
    config.warmup_from = 0.0067  # the reference's third of the peak
    config.learning_rate_decay_steps = "960000, 1280000 examples"  # as many for other batches

    # Evaluation.
    config.eval_batch_size = 16
    config.max_detections = 100  # of an image
    # Of a class, the best detections that take part in the suppression; 0 = 2 * max_detections.
    config.class_candidates = 0
    config.target = 0.377  # mAP of boxes to reach
    config.mask_target = 0.339  # mAP of masks to reach, in the same evaluation
    return config
