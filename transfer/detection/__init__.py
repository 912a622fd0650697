"""Fast and Faster R-CNN on Detectron2, the only place that imports it."""
