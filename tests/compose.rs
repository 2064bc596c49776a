//! compose.yaml and what it builds and mounts, as far as they can be proved without containers: the specification's schema,
//! the configuration that its Envoy and its bouncers get, and what a production image owes.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_yaml::{Mapping, Value};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

fn read(file: &str) -> String {
    std::fs::read_to_string(Path::new(ROOT).join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// A YAML text with its merge keys carried out.
fn yaml(text: &str) -> Value {
    let mut value: Value = serde_yaml::from_str(text).unwrap();
    value.apply_merge().unwrap();
    value
}

fn compose() -> Value {
    yaml(&read("compose.yaml"))
}

fn services(compose: &Value) -> BTreeMap<&str, &Mapping> {
    let all = compose["services"].as_mapping().unwrap();
    all.iter().map(|(name, service)| (name.as_str().unwrap(), service.as_mapping().unwrap())).collect()
}

fn texts(value: Option<&Value>) -> Vec<&str> {
    value.and_then(Value::as_sequence).into_iter().flatten().map(|text| text.as_str().unwrap()).collect()
}

/// The bind mounts of a service: where it is in the container, and where in the repository.
fn mounts(service: &Mapping) -> Vec<(&str, PathBuf, &str)> {
    let volumes = texts(service.get("volumes")).into_iter().filter(|volume| volume.starts_with("./"));
    volumes
        .map(|volume| {
            let parts: Vec<_> = volume.split(':').collect();
            let [source, target, mode] = parts[..] else { panic!("{volume} is not SOURCE:TARGET:MODE") };
            (target, Path::new(ROOT).join(source), mode)
        })
        .collect()
}

/// Runs `check-jsonschema` against the schema of the compose specification.
fn check(files: &[PathBuf]) -> Output {
    let fetched = || Path::new(ROOT).join(".tools/check-jsonschema/bin/check-jsonschema").into_os_string();
    let program = std::env::var_os("CHECK_JSONSCHEMA").unwrap_or_else(fetched);
    Command::new(&program)
        .args(["--builtin-schema", "vendor.compose-spec"])
        .args(files)
        .output()
        .unwrap_or_else(|error| panic!("{}: {error}; `make test` fetches it", program.display()))
}

#[test]
fn file_follows_the_compose_specification() {
    let checked = check(&[Path::new(ROOT).join("compose.yaml")]);
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stdout));
}

#[test]
fn check_against_the_specification_sees_a_field_that_is_not_in_it() {
    let dir = tempfile::tempdir().unwrap();
    let faults =
        [("stop_grace_period:", "stop_grace:"), ("interval: 2s", "intervals: 2s"), ("memory: 1G", "memory: [1G]")];
    let files = faults.map(|(right, wrong)| {
        let text = read("compose.yaml");
        assert!(text.contains(right), "{right}");
        let file = dir.path().join(format!("{}.yaml", wrong.split(':').next().unwrap()));
        std::fs::write(&file, text.replace(right, wrong)).unwrap();
        file
    });
    let checked = check(&files);
    let said = String::from_utf8_lossy(&checked.stdout);
    assert_eq!(checked.status.code(), Some(1), "{said}");
    for file in files {
        assert!(said.contains(&format!("{}::", file.display())), "{said}");
    }
}

#[test]
fn topology_is_whole() {
    let compose = compose();
    let names: Vec<_> = services(&compose).into_keys().collect();
    let whole = ["bouncer-1", "bouncer-2", "envoy", "grafana", "prometheus", "rabbitmq", "redis", "upstream"];
    assert_eq!(names, whole);
}

#[test]
fn every_service_is_pinned_checked_bounded_restarted_and_private() {
    let compose = compose();
    for (name, service) in services(&compose) {
        let (_, tag) =
            service["image"].as_str().unwrap().split_once(':').unwrap_or_else(|| panic!("{name} has no tag"));
        // A whole version, or the image that is built from here.
        let version = tag.trim_start_matches('v').split('-').next().unwrap().split('.');
        assert!(
            tag == "local" || version.clone().count() == 3 && version.clone().all(|n| n.parse::<u32>().is_ok()),
            "{tag}"
        );
        assert!(service["healthcheck"]["test"].is_sequence(), "{name}");
        assert_eq!(service["restart"], "unless-stopped", "{name}");
        let limits = &service["deploy"]["resources"]["limits"];
        assert!(limits["cpus"].is_string() && limits["memory"].is_string(), "{name}");
        assert!(texts(service.get("security_opt")).contains(&"no-new-privileges:true"), "{name}");
        for port in texts(service.get("ports")) {
            assert!(port.starts_with("127.0.0.1:"), "{name} is open to the network: {port}");
        }
        for (target, source, mode) in mounts(service) {
            assert!(source.exists(), "{name}: {} is not there", source.display());
            assert_eq!(mode, "ro", "{name}: {target}");
        }
    }
}

#[test]
fn services_start_when_what_they_need_is_healthy() {
    let compose = compose();
    let services = services(&compose);
    let needs = |name: &str| -> BTreeSet<&str> {
        let Some(needed) = services[name].get("depends_on") else { return BTreeSet::new() };
        let each = needed.as_mapping().unwrap().iter().map(|(needed, how)| {
            assert_eq!(how["condition"], "service_healthy", "{name}");
            needed.as_str().unwrap()
        });
        each.collect()
    };
    for bouncer in ["bouncer-1", "bouncer-2"] {
        assert_eq!(needs(bouncer), BTreeSet::from(["rabbitmq", "redis"]));
    }
    assert_eq!(needs("envoy"), BTreeSet::from(["bouncer-1", "bouncer-2", "upstream"]));
    assert_eq!(needs("grafana"), BTreeSet::from(["prometheus"]));
}

/// What the command of compose's Envoy makes of the shipped file, with paths of this machine instead of the container's.
fn envoy_configuration(out: &Path) -> Output {
    let compose = compose();
    let envoy = services(&compose)["envoy"];
    let command = texts(envoy.get("command"));
    let ["sh", "-c", script] = command[..] else { panic!("{command:?}") };
    let mut script = script.to_owned();
    for (target, source, _) in mounts(envoy) {
        assert!(script.contains(target), "{target} is mounted for nothing");
        script = script.replace(target, source.to_str().unwrap());
    }
    assert_eq!((script.matches("/tmp/envoy.yaml").count(), script.matches("exec envoy ").count()), (2, 1), "{script}");
    let script = script
        .replace("/tmp/envoy.yaml", out.to_str().unwrap())
        .replace("exec envoy ", "exec \"$ENVOY\" --mode validate ");
    Command::new("sh").args(["-c", &script]).env("ENVOY", support::envoy::binary()).output().unwrap()
}

#[test]
fn envoy_gets_the_shipped_configuration_with_other_addresses_and_nothing_else_changed() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("envoy.yaml");
    let validated = envoy_configuration(&file);
    assert!(validated.status.success(), "{}", String::from_utf8_lossy(&validated.stderr));

    let derived = std::fs::read_to_string(file).unwrap();
    let (mut addresses, mut resolved) = (Vec::new(), 0);
    let (ours, shipped) = (yaml(&derived), yaml(support::envoy::CONFIG));
    compare(&shipped, &ours, "", &mut |path, shipped, ours| match (path, shipped, ours) {
        // An address: a socket's, or the list of one for each replica.
        (path, shipped, ours) if path.ends_with("/socket_address") => {
            let port = |socket: &Value| socket["port_value"].as_u64().unwrap();
            assert_eq!(socket_without_address(shipped), socket_without_address(ours), "{path}");
            addresses.push(format!("{}:{} for {}", ours["address"].as_str().unwrap(), port(ours), port(shipped)));
        }
        (path, Value::Sequence(shipped), Value::Sequence(ours)) if path.ends_with("/lb_endpoints") => {
            let [only] = &shipped[..] else { panic!("{path}") };
            for endpoint in ours {
                let socket = &endpoint["endpoint"]["address"]["socket_address"];
                addresses.push(format!(
                    "{}:{}",
                    socket["address"].as_str().unwrap(),
                    socket["port_value"].as_u64().unwrap()
                ));
                let mut same = endpoint.clone();
                same["endpoint"]["address"]["socket_address"] = only["endpoint"]["address"]["socket_address"].clone();
                assert_eq!(&same, only, "{path}");
            }
        }
        // How a name becomes an address.
        (path, shipped, ours) if path.starts_with("/static_resources/clusters/") && path.ends_with("/type") => {
            assert_eq!((shipped.as_str(), ours.as_str()), (Some("STATIC"), Some("STRICT_DNS")), "{path}");
            resolved += 1;
        }
        (path, shipped, ours) => panic!("{path}: {shipped:?} became {ours:?}"),
    });
    let expected = [
        "0.0.0.0:9901 for 9901",
        "0.0.0.0:8080 for 8080",
        "bouncer-1:9191",
        "bouncer-2:9191",
        "upstream:8081 for 8081",
        "upstream:8081 for 8081",
    ];
    assert_eq!((addresses, resolved), (expected.map(str::to_owned).to_vec(), 3));
    // The comments say why each setting is there, so they go along.
    assert_eq!(comments(&derived), comments(support::envoy::CONFIG));
}

fn comments(text: &str) -> Vec<&str> {
    text.lines().map(str::trim_start).filter(|line| line.starts_with('#')).collect()
}

fn socket_without_address(socket: &Value) -> Value {
    let mut rest = socket.as_mapping().unwrap().clone();
    rest.remove("address").unwrap();
    rest.remove("port_value").unwrap();
    Value::Mapping(rest)
}

/// Calls `differs` with the path and both sides of the outermost nodes that differ where an address, a list of endpoints or
/// anything that has no inside is reached.
fn compare(shipped: &Value, ours: &Value, path: &str, differs: &mut impl FnMut(&str, &Value, &Value)) {
    if shipped == ours {
        return;
    }
    let whole = path.ends_with("/socket_address");
    match (shipped, ours) {
        (Value::Mapping(a), Value::Mapping(b)) if !whole && a.keys().eq(b.keys()) => {
            for (key, value) in a {
                compare(value, &b[key], &format!("{path}/{}", key.as_str().unwrap()), differs);
            }
        }
        (Value::Sequence(a), Value::Sequence(b)) if a.len() == b.len() => {
            for (at, (a, b)) in a.iter().zip(b).enumerate() {
                compare(a, b, &format!("{path}/{at}"), differs);
            }
        }
        _ => differs(path, shipped, ours),
    }
}

#[test]
fn addresses_are_changed_all_or_none() {
    let script = Path::new(ROOT).join("envoy/addresses.sh");
    let run = |arguments: &[&str], config: &str| {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("envoy.yaml");
        std::fs::write(&file, config).unwrap();
        let stdin = std::fs::File::open(file).unwrap();
        Command::new("sh").arg(&script).args(arguments).stdin(stdin).output().unwrap()
    };
    let shipped = ["127.0.0.1:8080", "127.0.0.1:9901", "127.0.0.1:8081", "127.0.0.1:9191"];
    assert_eq!(String::from_utf8(run(&shipped, support::envoy::CONFIG).stdout).unwrap(), support::envoy::CONFIG);

    let cut = support::envoy::CONFIG.replace("port_value: 9191 ", "port_value: 9999 ");
    let refused = run(&shipped, &cut);
    assert_eq!((refused.status.code(), refused.stdout.len()), (Some(1), 0));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("9191"));

    assert_eq!(run(&shipped[..3], support::envoy::CONFIG).status.code(), Some(64));
}

#[test]
fn bouncers_take_their_configuration() {
    let compose = compose();
    for name in ["bouncer-1", "bouncer-2"] {
        let service = services(&compose)[name];
        let [(target, source, _)] = &mounts(service)[..] else { panic!("{name}") };
        assert!(read("Dockerfile").contains(&format!("\"-c\", \"{target}\"")), "{target}");
        let environment = service["environment"].as_mapping().unwrap();
        let pairs = environment.iter().map(|(name, value)| (name.as_str().unwrap(), value.as_str().unwrap()));
        let dockerfile = read("Dockerfile");
        let image = dockerfile.lines().filter_map(|line| line.strip_prefix("ENV ")).flat_map(str::split_whitespace);
        let checked = Command::new(env!("CARGO_BIN_EXE_bouncer"))
            .env_clear()
            .envs(image.filter_map(|pair| pair.split_once('=')))
            .envs(pairs)
            .args(["check", "-c"])
            .arg(source)
            .output()
            .unwrap();
        let (said, faults) = (String::from_utf8_lossy(&checked.stdout), String::from_utf8_lossy(&checked.stderr));
        assert!(checked.status.success(), "{faults}");
        for expected in ["0.0.0.0:9191", "0.0.0.0:9192", "redis://redis:6379", "rabbitmq:5672", "move"] {
            assert!(said.contains(expected), "{expected} in {said}");
        }
        // Killed in the middle of its drain, it would cut off what is under way: 2 s, 30 s, and a little.
        assert_eq!(service["stop_grace_period"], "35s");
    }
}

#[test]
fn image_has_its_probe_and_no_root_and_its_build_gets_what_it_reads() {
    let dockerfile = read("Dockerfile");
    let stages: Vec<_> = dockerfile.lines().filter_map(|line| line.strip_prefix("FROM ")).collect();
    let names: Vec<_> = stages.iter().map(|stage| stage.split(" AS ").nth(1).unwrap()).collect();
    assert_eq!(names, ["build", "base", "upstream", "bouncer"], "the last one is what is built by default");
    for stage in stages {
        let image = stage.split(' ').next().unwrap();
        assert!(names.contains(&image) || image.rsplit_once(':').is_some_and(|(_, tag)| tag.contains('.')), "{image}");
    }
    let base = &dockerfile[dockerfile.find(" AS base").unwrap()..];
    let users: Vec<_> = base.lines().filter_map(|line| line.strip_prefix("USER ")).collect();
    assert_eq!(users, ["65532:65532"]);
    assert!(dockerfile.contains("CMD [\"bouncer\", \"probe\"]"));

    let ignore = read(".dockerignore");
    let sent: BTreeSet<_> = ignore.lines().filter_map(|line| line.strip_prefix('!')).collect();
    assert!(ignore.lines().any(|line| line == "*"), "what is not named is not sent");
    for needed in read_by_a_build() {
        assert!(sent.contains(needed.as_str()), "the build reads {needed}, which .dockerignore leaves out");
    }
    for name in sent {
        assert!(Path::new(ROOT).join(name).exists(), "{name}");
    }
}

/// The top-level names that `cargo build` reads: its own, and what the sources include from outside their folder.
fn read_by_a_build() -> BTreeSet<String> {
    let optional = ["build.rs", "proto"].into_iter().filter(|name| Path::new(ROOT).join(name).exists());
    let mut names: BTreeSet<_> =
        ["Cargo.toml", "Cargo.lock", "src", "examples"].into_iter().chain(optional).map(str::to_owned).collect();
    let mut folders = vec![Path::new(ROOT).join("src")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let text = String::from_utf8_lossy(&std::fs::read(&path).unwrap()).into_owned();
            for included in text.split("include_str!(\"").skip(1) {
                let file = path.parent().unwrap().join(included.split('"').next().unwrap());
                let file = file.canonicalize().unwrap_or_else(|error| panic!("{}: {error}", file.display()));
                let within = file.strip_prefix(Path::new(ROOT).canonicalize().unwrap()).unwrap().to_owned();
                names.insert(within.iter().next().unwrap().to_str().unwrap().to_owned());
            }
        }
    }
    names
}

#[test]
fn what_watches_looks_at_services_of_this_file() {
    let compose = compose();
    let services = services(&compose);
    let prometheus = yaml(&read("prometheus/prometheus.yml"));
    let jobs = prometheus["scrape_configs"].as_sequence().unwrap().iter();
    let targets: BTreeMap<_, _> =
        jobs.map(|job| (job["job_name"].as_str().unwrap(), texts(job["static_configs"][0].get("targets")))).collect();
    assert_eq!(targets["bouncer"], ["bouncer-1:9192", "bouncer-2:9192"]);
    assert_eq!(targets["envoy"], ["envoy:9901"]);
    for target in targets.values().flatten() {
        let host = target.split(':').next().unwrap();
        assert!(services.contains_key(host), "{target}");
    }

    let source = yaml(&read("grafana/provisioning/datasources/prometheus.yaml"));
    let source = &source["datasources"][0];
    assert_eq!(source["url"], "http://prometheus:9090");
    // Grafana's $__rate_interval follows from it.
    assert_eq!(source["jsonData"]["timeInterval"], prometheus["global"]["scrape_interval"]);
    let provider = yaml(&read("grafana/provisioning/dashboards/bouncer.yaml"));
    let folder = provider["providers"][0]["options"]["path"].as_str().unwrap();
    let grafana = mounts(services["grafana"]);
    assert!(grafana.iter().any(|(target, source, _)| *target == folder && source.ends_with("grafana/dashboards")));

    let dashboard: serde_json::Value = serde_json::from_str(&read("grafana/dashboards/bouncer.json")).unwrap();
    let uid = source["uid"].as_str().unwrap();
    let mut ids = BTreeSet::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "two panels are {}", panel["id"]);
        for target in panel["targets"].as_array().into_iter().flatten() {
            assert_eq!(target["datasource"]["uid"], uid, "{}", panel["title"]);
        }
    }
}
