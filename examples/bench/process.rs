//! A child process, and what it costs.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::Result;

/// What `/proc` counts processor time in: Linux shows it in hundredths of a second whatever its own tick is.
const TICK: Duration = Duration::from_millis(10);

/// Killed and reaped on drop.
pub(crate) struct Process {
    child: Child,
}

impl Process {
    /// Starts `command`; stderr, and with `keep_output` also stdout, go to `dir/NAME.log`.
    pub(crate) fn spawn(name: &str, command: &mut Command, dir: &Path, keep_output: bool) -> Result<Self> {
        let log = File::create(dir.join(format!("{name}.log")))?;
        let output = if keep_output { log.try_clone()?.into() } else { Stdio::null() };
        let child = command.stdin(Stdio::null()).stdout(output).stderr(log).spawn();
        Ok(Self { child: child.map_err(|error| format!("cannot start {name} ({command:?}): {error}"))? })
    }

    /// Processor time of all its threads so far, user and system.
    pub(crate) fn cpu(&self) -> Result<Duration> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        // The name in parentheses may hold spaces; utime and stime are fields 14 and 15, counted from before it.
        let fields = stat.rsplit_once(") ").ok_or("no name in /proc/PID/stat")?.1;
        let ticks: u32 =
            fields.split(' ').skip(11).take(2).map(str::parse::<u32>).sum::<std::result::Result<_, _>>()?;
        Ok(TICK * ticks)
    }

    /// Resident memory in KiB.
    pub(crate) fn resident_kib(&self) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no VmRSS")?;
        Ok(line.trim().trim_end_matches(" kB").parse()?)
    }

    pub(crate) fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill(Pid::from_raw(i32::try_from(self.child.id())?), signal)?)
    }

    pub(crate) fn has_ended(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only for a process that is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
