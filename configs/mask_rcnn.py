"""Mask R-CNN with ResNet-50 and a feature pyramid on COCO: MLPerf's benchmark from v0.5 on.

configs/_detection.py has the keys of both detectors, configs/_loop.py the keys of all benchmarks.
docs/mask_rcnn.md explains the recipes.
"""

import ml_collections

from configs import _detection


def get_config() -> ml_collections.ConfigDict:
    """The recipe's values and the keys of the Mask R-CNN benchmark."""
    config = _detection.get_config()
    config.benchmark = "mask_rcnn"

    # Data.
    config.data_env = "MLP_PATH_GCS_MASKRCNN"
    # An image is resized to `image_short` on its short side, or to less if the long side would
    # exceed `image_long`. Then it is padded to `image_shape` (height, width), or if it is higher
    # than wide, to the same turned round. The images of a batch have one orientation.
    config.image_short = 800
    config.image_long = 1333
    config.image_shape = (832, 1344)
    config.mask_size = 112  # of a true mask, which spans the box of its object
    config.shuffle_buffer_size = 4096  # images held for shuffling, over all hosts
    config.input_streams = 32  # a multiple of every number of hosts the run will have

    # Model.
    config.resnet_stages = (3, 4, 6, 3)  # blocks per stage: ResNet-50
    config.resnet_bottleneck = True
    config.space_to_depth = False
    config.freeze = "stem, stage1"  # these layers keep the values of `init_from`
    # "frozen": BatchNorm keeps the statistics, scales and shifts of `init_from`; or "batch".
    config.bn_statistics = "frozen"
    config.bn_epsilon = 1e-5  # added to the variance
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
    config.learning_rate_per = 16  # images
    config.warmup_steps = "500"
    config.warmup_from = 0.0067  # the reference's third of the peak
    config.learning_rate_decay_steps = "960000, 1280000 examples"  # as many for other batches

    # Evaluation.
    config.eval_batch_size = 16
    config.max_detections = 100  # of an image
    # Of a class, the best detections that take part in the suppression; 0 = 2 * max_detections.
    config.class_candidates = 0
    config.target = 0.377  # mAP of boxes
    config.mask_target = 0.339  # mAP of masks, in the same evaluation
    return config
