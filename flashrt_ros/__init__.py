"""ROS 2 side of flashrt: nodes, conversions, parameters. Imports nothing: messages load fast."""

from pkgutil import extend_path

# From the source root, flashrt_ros.msg, .srv and .action still come from the installed package.
__path__ = extend_path(__path__, __name__)
