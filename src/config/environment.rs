//! The environment as a source: which variables are meant for bouncer, and which field each one sets.
//!
//! figment merges maps and replaces lists, but most of what a variable sets lies inside a list (`pools`, `tiers`). So
//! figment keeps the variables apart, each with the metadata that names it, and they are put into the tree here.

use std::collections::BTreeMap;

use figment::value::{Dict, Map, Num, Tag, Value};
use figment::{Error, Metadata, Profile, Provider};

use super::fault::Fault;
use super::field::{LARGEST_COUNT, LONGEST};
use super::reader::{ENVIRONMENT, Report, digits, kind, quoted};

const PREFIX: &str = "BOUNCER_";
const ALIASES: [&str; 5] = ["REDIS_URL", "RABBITMQ_URL", "MAX_IN_FLIGHT", "MAX_QUEUE_LENGTH", "MAX_QUEUE_WAIT_MS"];
/// Levels in a variable's name, and brackets within brackets in its value. No field lies deeper than six.
const DEEPEST: usize = 16;
const QUEUE_LENGTH_OF: &str = "MAX_QUEUE_LENGTH_";

/// One variable of the process.
#[derive(Clone)]
pub(super) struct Variable {
    pub(super) name: String,
    pub(super) value: String,
}

/// The variables that are meant for bouncer, in the order of their names.
pub(super) fn meant_for_us(env: impl Iterator<Item = (String, String)>) -> Vec<Variable> {
    let mut variables: Vec<_> = env.filter(|(name, value)| is_ours(name, value)).collect();
    variables.sort();
    variables.into_iter().map(|(name, value)| Variable { name, value }).collect()
}

fn is_ours(name: &str, value: &str) -> bool {
    match name.strip_prefix(PREFIX) {
        Some(rest) => !is_service_link(rest),
        // Compose files and charts hand on variables that nobody set as empty ones.
        None => !blank(value) && (ALIASES.contains(&name) || name.starts_with(QUEUE_LENGTH_OF)),
    }
}

/// Kubernetes tells each pod about the Services of its namespace in variables: for one called `bouncer`,
/// `BOUNCER_SERVICE_HOST`, `BOUNCER_SERVICE_PORT_GRPC`, `BOUNCER_PORT`, `BOUNCER_PORT_9191_TCP_ADDR` and so on, for its
/// neighbour `bouncer-redis` the same with `BOUNCER_REDIS_`. They are nobody's settings, and must not keep a pod from
/// starting because it has a Service. No field of the first level has such a name.
fn is_service_link(rest: &str) -> bool {
    let of_bouncer = rest == "PORT" || ["PORT_", "SERVICE_HOST", "SERVICE_PORT"].iter().any(|it| rest.starts_with(it));
    of_bouncer || (!rest.contains("__") && rest.split('_').any(|word| word == "PORT" || word == "SERVICE"))
}

fn blank(text: &str) -> bool {
    trimmed(text).is_empty()
}

/// Without the white space, line ends and byte order marks that files and templates leave around a value.
pub(super) fn trimmed(text: &str) -> &str {
    text.trim_matches(|letter: char| letter.is_whitespace() || letter == '\u{feff}')
}

/// Where figment keeps the variables, apart from the file.
pub(super) fn profile() -> Profile {
    Profile::new(ENVIRONMENT)
}

impl Provider for Variable {
    fn metadata(&self) -> Metadata {
        Metadata::from(self.name.clone(), ENVIRONMENT)
    }

    /// A list, a map or a quoted text is read as figment reads them. Anything else stays the text that it is: the field
    /// knows whether it wants a number.
    fn data(&self) -> Result<Map<Profile, Dict>, Error> {
        let text = trimmed(&self.value);
        let structured = self.name.starts_with(PREFIX) && text.starts_with(['[', '{', '"']) && is_parsable(text);
        let value = structured.then(|| text.parse::<Value>().ok()).flatten().unwrap_or_else(|| Value::from(text));
        Ok(profile().collect(Dict::from([(self.name.clone(), value)])))
    }
}

/// Whether figment's parser can be trusted with a text. It cuts a quoted text at its first escape, and counts letters
/// where it needs bytes: with any other letter than ASCII before it, the value comes out wrong or the process panics.
fn is_parsable(text: &str) -> bool {
    depth(text) <= DEEPEST && (text.is_ascii() || !text.contains('\\'))
}

/// How deep the brackets of a text go. figment's parser recurses into them, at the cost of the stack.
fn depth(text: &str) -> usize {
    let step = |(deepest, open): (usize, usize), byte| match byte {
        b'[' | b'{' => (deepest.max(open + 1), open + 1),
        b']' | b'}' => (deepest, open.saturating_sub(1)),
        _ => (deepest, open),
    };
    text.bytes().fold((0, 0), step).0
}

/// One field that the environment set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Override {
    /// Such as `pools[0].max_in_flight`.
    pub path: String,
    /// The variable.
    pub variable: String,
}

/// Puts the variables into the tree: the aliases first, so that `BOUNCER_` wins.
pub(super) fn apply(tree: &mut Value, variables: Dict, report: &Report<'_>) -> Vec<Override> {
    let (named, aliases): (Dict, Dict) = variables.into_iter().partition(|(name, _)| name.starts_with(PREFIX));
    let mut overlay = Overlay { tree, report, set: BTreeMap::new() };
    overlay.aliases(&aliases);
    overlay.named(named);
    overlay.set.into_iter().map(|(path, variable)| Override { path, variable }).collect()
}

/// The tree while variables are put into it.
struct Overlay<'a> {
    tree: &'a mut Value,
    report: &'a Report<'a>,
    /// Path to variable.
    set: BTreeMap<String, String>,
}

impl Overlay<'_> {
    fn aliases(&mut self, given: &Dict) {
        for (name, root) in [("REDIS_URL", "redis"), ("RABBITMQ_URL", "rabbitmq")] {
            if let Some(url) = given.get(name) {
                self.put(name, &[root, "url"], url.clone());
            }
        }
        if let Some(count) = given.get("MAX_IN_FLIGHT").and_then(|value| self.count("MAX_IN_FLIGHT", value, 1)) {
            match self.names("pools").iter().position(|name| name == super::DEFAULT_POOL) {
                Some(index) => self.put("MAX_IN_FLIGHT", &["pools", &index.to_string(), "max_in_flight"], count),
                None => self.report.warn("MAX_IN_FLIGHT: the file has no pool `default` for it".to_owned()),
            }
        }
        let tiers = self.names("tiers");
        self.queue_waits(given, tiers.len());
        self.queue_lengths(given, &tiers);
    }

    fn queue_waits(&mut self, given: &Dict, tiers: usize) {
        const NAME: &str = "MAX_QUEUE_WAIT_MS";
        let Some(value) = given.get(NAME) else { return };
        let longest = u64::try_from(LONGEST.as_millis()).unwrap_or(u64::MAX);
        let Some(ms) = value.as_str().and_then(digits).filter(|ms| (1..=longest).contains(ms)) else {
            self.refuse(NAME, value, &format!("whole milliseconds from 1 to {longest}"));
            return;
        };
        for index in 0..tiers {
            let wait = Value::String(value.tag(), format!("{ms}ms"));
            self.put(NAME, &["tiers", &index.to_string(), "queue", "max_wait"], wait);
        }
    }

    fn queue_lengths(&mut self, given: &Dict, tiers: &[String]) {
        let mut lengths = Dict::new();
        let mut unused: Vec<&str> = Vec::new();
        for (name, value) in given.iter().filter(|(name, _)| name.starts_with("MAX_QUEUE_LENGTH")) {
            if let Some(length) = self.count(name, value, 0) {
                lengths.insert(name.clone(), length);
                unused.push(name);
            }
        }
        for (index, tier) in tiers.iter().enumerate() {
            let Some((name, length)) = length_of(tier, &lengths) else { continue };
            unused.retain(|unused| *unused != name);
            self.put(name, &["tiers", &index.to_string(), "queue", "length"], length.clone());
        }
        for name in unused.iter().filter(|name| name.starts_with(QUEUE_LENGTH_OF)) {
            self.report.warn(format!("{name}: the file has no tier of this name"));
        }
    }

    /// `BOUNCER_POOLS__0__NAME`: names in any case, a number for a place in a list. A variable for the whole of
    /// something comes before the ones for its parts.
    fn named(&mut self, given: Dict) {
        let path = |name: &str| -> Vec<String> {
            let levels = name.strip_prefix(PREFIX).unwrap_or(name).to_ascii_lowercase();
            levels.splitn(DEEPEST, "__").map(str::to_owned).collect()
        };
        let mut given: Vec<_> = given.into_iter().map(|(name, value)| (path(&name), name, value)).collect();
        given.sort_by(|(a, ..), (b, ..)| a.len().cmp(&b.len()).then_with(|| a.cmp(b)));
        for (path, name, value) in given {
            let path: Vec<&str> = path.iter().map(String::as_str).collect();
            self.put(&name, &path, value);
        }
    }

    /// The number in an alias. Its fault names the variable once, not every field that it would set.
    fn count(&self, name: &str, value: &Value, least: u64) -> Option<Value> {
        let number = value.as_str().and_then(digits).filter(|number| (least..=LARGEST_COUNT).contains(number));
        if number.is_none() {
            self.refuse(name, value, &format!("a whole number from {least} to {LARGEST_COUNT}"));
        }
        number.map(|number| Value::Num(value.tag(), Num::U64(number)))
    }

    fn refuse(&self, name: &str, value: &Value, expected: &str) {
        let found = value.as_str().map_or_else(|| kind(value).to_owned(), quoted);
        let (path, expected, source) = (name.to_owned(), expected.to_owned(), ENVIRONMENT.to_owned());
        self.report.fault(Fault { path, found, expected, source });
    }

    /// The names in a list of named things, empty where one has none.
    fn names(&self, list: &str) -> Vec<String> {
        let items = self.tree.as_dict().and_then(|tree| tree.get(list)).and_then(Value::as_array).unwrap_or_default();
        let name = |item: &Value| item.as_dict()?.get("name")?.as_str().map(str::to_owned);
        items.iter().map(|item| name(item).unwrap_or_default()).collect()
    }

    fn put(&mut self, variable: &str, path: &[&str], value: Value) {
        match place(self.tree, path, value) {
            Ok(()) => {
                self.set.insert(dotted(path), variable.to_owned());
            }
            Err(misplaced) => self.report.fault(Fault {
                path: path.join("."),
                found: format!("{} for a place in a list", quoted(&misplaced.segment)),
                expected: match misplaced.items {
                    0 => "no such variable, as the list is empty".to_owned(),
                    items => format!("a number from 0 to {}", items - 1),
                },
                source: variable.to_owned(),
            }),
        }
    }
}

/// `pools[0].max_in_flight`, as the faults write it.
fn dotted(path: &[&str]) -> String {
    path.iter().enumerate().fold(String::new(), |path, (depth, segment)| match digits(segment) {
        Some(index) if depth > 0 && !segment.is_empty() => format!("{path}[{index}]"),
        _ if depth == 0 => (*segment).to_owned(),
        _ => format!("{path}.{segment}"),
    })
}

/// The length for a tier: its own by the very name, its own in any case and with `_` for what a variable's name cannot
/// hold, or the general one.
fn length_of<'a>(tier: &str, lengths: &'a Dict) -> Option<(&'a str, &'a Value)> {
    let own = |(name, _): &(&String, &Value)| {
        name.strip_prefix(QUEUE_LENGTH_OF).is_some_and(|name| folded(name) == folded(tier))
    };
    let exact = lengths.get_key_value(&format!("{QUEUE_LENGTH_OF}{tier}"));
    let found = exact.or_else(|| lengths.iter().find(own)).or_else(|| lengths.get_key_value("MAX_QUEUE_LENGTH"));
    found.map(|(name, value)| (name.as_str(), value))
}

fn folded(name: &str) -> String {
    name.to_ascii_uppercase().replace(['-', '.'], "_")
}

/// A segment that is no place in the list it meets.
struct Misplaced {
    segment: String,
    items: usize,
}

/// Puts a value at a path: maps are merged, everything else is replaced.
fn place(at: &mut Value, path: &[&str], new: Value) -> Result<(), Misplaced> {
    let Some((segment, rest)) = path.split_first() else {
        merge(at, new);
        return Ok(());
    };
    if let Value::Array(_, items) = at {
        let count = items.len();
        let index = digits(segment).and_then(|index| usize::try_from(index).ok());
        let item = index.and_then(|index| items.get_mut(index));
        let item = item.ok_or_else(|| Misplaced { segment: (*segment).to_owned(), items: count })?;
        return place(item, rest, new);
    }
    if !matches!(at, Value::Dict(..)) {
        *at = Value::Dict(new.tag(), Dict::new());
    }
    if let Value::Dict(_, fields) = at {
        let empty = Value::Dict(new.tag(), Dict::new());
        return place(fields.entry((*segment).to_owned()).or_insert(empty), rest, new);
    }
    Ok(())
}

fn merge(old: &mut Value, new: Value) {
    match (old, new) {
        (Value::Dict(_, old), Value::Dict(_, new)) => {
            for (name, value) in new {
                let slot = old.entry(name).or_insert(Value::Dict(Tag::Default, Dict::new()));
                merge(slot, value);
            }
        }
        (old, new) => *old = new,
    }
}
