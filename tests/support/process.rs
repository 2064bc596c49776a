//! A child process that does not outlive its test.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::wait::eventually;

/// Killed and reaped on drop; when a test fails, the end of its log is printed.
pub(crate) struct Process {
    name: &'static str,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts `command` with stderr appended to `log`, and stdout too unless `stdout` names another file.
    pub(crate) fn spawn(name: &'static str, command: &mut Command, log: &Path, stdout: Option<&Path>) -> Self {
        Self::spawn_with(name, command.stdout(append(stdout.unwrap_or(log))).stderr(append(log)), log)
    }

    /// The same, with the output going where `command` says, which is not `log` then.
    pub(crate) fn spawn_with(name: &'static str, command: &mut Command, log: &Path) -> Self {
        let child = command
            .stdin(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {name} ({command:?}): {error}"));
        Self { name, child, log: log.to_owned() }
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.child.id()).expect("a pid"))
    }

    /// Sends a signal, and does not wait for what comes of it.
    pub(crate) fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).expect("the process was not reaped yet");
    }

    /// SIGSTOP, and no thread runs any more when this returns: the signal reaches one of them, which stops the others
    /// when its turn comes. SIGCONT ends it.
    pub(crate) async fn freeze(&self) {
        self.signal(Signal::SIGSTOP);
        let what = format!("{} at a standstill", self.name);
        eventually(&what, Duration::from_secs(10), async || {
            let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid())).expect("a process");
            let mut states = tasks.map(|task| read(&task.expect("a thread").path().join("status")));
            states.all(|status| status.contains("\nState:\tT")).then_some(())
        })
        .await;
    }

    /// SIGKILL, and gone when this returns.
    pub(crate) fn kill9(&mut self) {
        // Fails only for a process that has ended already.
        let _ = self.child.kill();
        self.child.wait().expect("a child of this process");
    }

    /// How it ended, once it has.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("a child of this process")
    }

    /// Waits until it ends.
    ///
    /// # Panics
    /// When it has not ended in time.
    pub(crate) async fn exit(&mut self, within: Duration) -> ExitStatus {
        let what = format!("the end of {}", self.name);
        eventually(&what, within, async || self.ended()).await
    }

    /// # Panics
    /// When the process has ended, with the end of its log.
    pub(crate) fn assert_running(&mut self) {
        if let Some(status) = self.ended() {
            panic!("{} ended with {status}:\n{}", self.name, tail(&self.log_text()));
        }
    }

    /// Everything it has written to its log so far.
    pub(crate) fn log_text(&self) -> String {
        read(&self.log)
    }

    /// Resident memory in bytes.
    pub(crate) fn resident_bytes(&self) -> u64 {
        self.memory("VmRSS:")
    }

    /// The most resident memory it ever had, in bytes.
    pub(crate) fn peak_resident_bytes(&self) -> u64 {
        self.memory("VmHWM:")
    }

    /// Processor time it has used, its own and the system's for it.
    pub(crate) fn processor_time(&self) -> Duration {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid())).expect("a running process");
        // Behind the name in brackets, which may hold anything.
        let (_, fields) = stat.rsplit_once(')').expect("a name in brackets");
        let ticks = fields.split_whitespace().skip(11).take(2).map(|ticks| ticks.parse::<u64>().expect("a number"));
        // The kernel's ABI: a hundred a second, whatever the hardware's.
        Duration::from_millis(10 * ticks.sum::<u64>())
    }

    fn memory(&self, field: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).expect("a running process");
        let line = status.lines().find_map(|line| line.strip_prefix(field)).expect("a field of every process");
        let kib: u64 = line.trim().trim_end_matches(" kB").parse().expect("a number of kB");
        kib * 1024
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill9();
        if std::thread::panicking() {
            eprintln!("--- {} ---\n{}", self.name, tail(&self.log_text()));
        }
    }
}

/// The text of a file that a process may still be writing; empty when it is not there yet.
pub(crate) fn read(path: &Path) -> String {
    std::fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}

fn append(path: &Path) -> File {
    let file = OpenOptions::new().create(true).append(true).open(path);
    file.unwrap_or_else(|error| panic!("cannot write {}: {error}", path.display()))
}

/// The last 40 lines.
fn tail(text: &str) -> String {
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}
