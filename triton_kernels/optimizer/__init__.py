"""The optimizer's update in one launch."""
