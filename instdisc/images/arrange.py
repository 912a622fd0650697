"""python -m instdisc.images.arrange: class folders of links for ImageNet's val/ and Places205."""

import sys

from instdisc.cli import command
from instdisc.images.settings import ArrangeConfig

main = command(ArrangeConfig, "instdisc.images.class_folders:arrange")

if __name__ == "__main__":
    sys.exit(main())
