"""Recordings of executor and planner: what they saw, were told and did; replayed, and compared.

``record`` writes an ordinary rosbag2 folder (mcap or sqlite3) through the pure Python rosbags
library; ``replay`` feeds it through the executor's own conversion code into a session, without
ROS; ``compare`` sets the chunks of two recordings side by side. Command: ``python -m
flashrt_ros.bag``.
"""
