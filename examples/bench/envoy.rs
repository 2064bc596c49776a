//! The shipped Envoy configuration, with its listener and its cluster `bouncer` once for each server that is compared.

use serde_yaml::Value;

use crate::Result;

const SHIPPED: &str = include_str!("../../envoy/envoy.yaml");

/// One listener, and the server that its filter asks.
pub(crate) struct Line<'a> {
    /// Names the listener's statistics and the cluster.
    pub(crate) name: &'a str,
    pub(crate) listener: u16,
    /// Without one the filter and the check of its verdict are left out.
    pub(crate) grpc: Option<u16>,
}

/// The configuration as YAML.
pub(crate) fn config(admin: u16, upstream: u16, lines: &[Line<'_>]) -> Result<String> {
    let mut config: Value = serde_yaml::from_str(SHIPPED)?;
    config["admin"]["address"]["socket_address"]["port_value"] = admin.into();
    let resources = &mut config["static_resources"];
    let [shipped_listener] = &list(&mut resources["listeners"])?[..] else { return Err("not one listener".into()) };
    let listeners = lines.iter().map(|line| listener(shipped_listener.clone(), line)).collect::<Result<Vec<_>>>()?;
    let mut clusters = Vec::new();
    for shipped in list(&mut resources["clusters"])? {
        if shipped["name"] == "bouncer" {
            let filters = lines.iter().filter_map(|line| Some((line.name, line.grpc?)));
            clusters.extend(filters.map(|(name, port)| cluster(shipped.clone(), name, port)));
        } else {
            let name = shipped["name"].as_str().ok_or("a cluster without a name")?.to_owned();
            clusters.push(cluster(shipped.clone(), &name, upstream));
        }
    }
    resources["listeners"] = listeners.into();
    resources["clusters"] = clusters.into();
    Ok(serde_yaml::to_string(&config)?)
}

fn listener(mut listener: Value, line: &Line<'_>) -> Result<Value> {
    listener["name"] = line.name.into();
    listener["address"]["socket_address"]["port_value"] = line.listener.into();
    let manager = &mut listener["filter_chains"][0]["filters"][0]["typed_config"];
    manager["stat_prefix"] = line.name.into();
    let filters = list(&mut manager["http_filters"])?;
    let found = filters.len();
    if line.grpc.is_some() {
        let asks = filters.iter_mut().find(|filter| filter["name"] == "envoy.filters.http.ext_proc");
        asks.ok_or("no ext_proc filter")?["typed_config"]["grpc_service"]["envoy_grpc"]["cluster_name"] =
            line.name.into();
    } else {
        filters.retain(|filter| {
            filter["name"] != "envoy.filters.http.ext_proc" && filter["name"] != "envoy.filters.http.rbac"
        });
        if filters.len() + 2 != found {
            return Err("not one ext_proc and one rbac filter".into());
        }
    }
    Ok(listener)
}

fn cluster(mut cluster: Value, name: &str, port: u16) -> Value {
    cluster["name"] = name.into();
    let assignment = &mut cluster["load_assignment"];
    assignment["cluster_name"] = name.into();
    let endpoint = &mut assignment["endpoints"][0]["lb_endpoints"][0]["endpoint"];
    endpoint["address"]["socket_address"]["port_value"] = port.into();
    cluster
}

fn list(value: &mut Value) -> Result<&mut Vec<Value>> {
    Ok(value.as_sequence_mut().ok_or("not a list")?)
}
