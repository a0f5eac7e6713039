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
    # Pixels of an image's short side. It is less if the long side
    # would exceed `image_long`. The images of a batch have one orientation.
    config.image_short = 800  # pixels of the short side
    config.image_long = 1333  # the most for its long side
    config.image_shape = (832, 1344)  # padded to this height and width; a high image: turned
    config.mask_size = 112  # side of a true mask, which spans its object's box
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
    config.bn_epsilon = 1e-5  # added to BatchNorm's variance
    config.pyramid_levels = (2, 3, 4, 5, 6)  # levels of the FPN; level l has the stride 2**l
    config.pyramid_filters = 256  # channels of the FPN
    # Anchors lie around the centres of the cells; or, as torchvision's, the first 'corners'.
    config.anchor_grid = "centres"
    config.anchor_scale = 8.0  # side of an anchor in cells of its level
    config.anchor_ratios = (0.5, 1.0, 2.0)  # height / width
    config.anchor_samples = 256  # anchors of an image that the loss counts
    config.anchor_positive_share = 0.5  # positive share of these, at most
    config.anchor_positive_iou = 0.7  # least IoU of a positive anchor with a true box
    config.anchor_negative_iou = 0.3  # largest IoU of a negative one
    config.proposals_before_nms = 2000  # per level, to train
    config.proposals_after_nms = 1000  # per image, to train
    config.eval_proposals_before_nms = 1000  # per level, to evaluate
    config.eval_proposals_after_nms = 1000  # per image, to evaluate
    config.proposal_nms_iou = 0.7  # nms_iou, but of proposals
    config.region_samples = 512  # the heads are trained on so many proposals and true boxes
    config.region_positive_share = 0.25  # positive share of these, at most
    config.region_iou = 0.5  # least IoU of a positive region with a true box
    config.region_scale = 224.0  # a square region of this side is pooled from level 4
    config.box_pool = 7  # RoIAlign's cells of a region, high and wide
    config.box_features = (1024, 1024)  # widths of the box head's layers
    config.mask_pool = 14  # RoIAlign's cells for masks
    config.mask_features = (256, 256, 256, 256)  # channels of the mask head's layers

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
    config.max_detections = 100  # of an image, at most
    # Detections per class that take part in NMS; 0 = 2 * max_detections.
    config.class_candidates = 0
    config.target = 0.377  # mAP of boxes to reach
    config.mask_target = 0.339  # mAP of masks to reach, in the same evaluation
    return config
