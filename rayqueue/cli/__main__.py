"""``python -m rayqueue.cli``"""

from rayqueue.cli import main

main()
