"""`evrun` with the stand-ins for coordinator and workers."""

import os
import sys
from pathlib import Path

from evrun.launch import cli, crew, detach, logs

HERE = Path(__file__).parent
crew.Crew.coordinator_module = (str(HERE / "coordinator.py"),)
crew.Crew.worker_module = (str(HERE / "worker.py"),)
detach.SUPERVISE = (str(HERE / "command_line.py"), "supervise")

if os.environ.get("LOGS_ON_A_FULL_DISK"):
    logs.LogFolder.create = lambda *_: os.open("/dev/full", os.O_WRONLY | os.O_CLOEXEC)

if sys.argv[1] == "supervise":
    from evrun.launch.supervise import main

    sys.exit(main(int(sys.argv[2])))
sys.exit(cli.main())
