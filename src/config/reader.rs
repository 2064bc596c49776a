//! The one reader of all fields: a place in the merged tree that knows its path and where it came from.
//!
//! Reading never stops at a fault: it is noted in the [`Report`], the value becomes `None`, and the walk goes on, so
//! that whoever wrote the file learns everything at once.

use std::cell::RefCell;
use std::fmt;
use std::ops::RangeInclusive;

use figment::value::{Dict, Num, Tag, Value};
use figment::{Figment, Source};

use super::fault::{Fault, REDACTED};

/// Marks the metadata of a variable: its values are all text and mean what the field wants.
pub(super) const ENVIRONMENT: &str = "environment";

/// What was noticed on the way.
pub(super) struct Report<'a> {
    sources: &'a Figment,
    /// Where the tree's root came from.
    origin: &'a str,
    faults: RefCell<Vec<Fault>>,
    warnings: RefCell<Vec<String>>,
}

impl<'a> Report<'a> {
    pub(super) fn new(sources: &'a Figment, origin: &'a str) -> Self {
        Self { sources, origin, faults: RefCell::default(), warnings: RefCell::default() }
    }

    pub(super) fn fault(&self, fault: Fault) {
        self.faults.borrow_mut().push(fault);
    }

    pub(super) fn warn(&self, warning: String) {
        self.warnings.borrow_mut().push(warning);
    }

    /// The file or the variable that a value came from.
    pub(super) fn source(&self, tag: Tag) -> &str {
        self.sources.get_metadata(tag).map_or(self.origin, |metadata| &metadata.name)
    }

    fn is_variable(&self, tag: Tag) -> bool {
        let source = self.sources.get_metadata(tag).and_then(|metadata| metadata.source.as_ref());
        source.and_then(Source::custom) == Some(ENVIRONMENT)
    }

    pub(super) fn finish(self) -> (Vec<Fault>, Vec<String>) {
        (self.faults.into_inner(), self.warnings.into_inner())
    }
}

/// The way from the root, kept on the stack and written out only for a fault.
#[derive(Clone, Copy)]
enum Path<'a> {
    Root,
    Field(&'a Path<'a>, &'a str),
    Item(&'a Path<'a>, usize),
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Path::Root => Ok(()),
            Path::Field(Path::Root, name) => f.write_str(&plain(name)),
            Path::Field(parent, name) => write!(f, "{parent}.{}", plain(name)),
            Path::Item(parent, index) => write!(f, "{parent}[{index}]"),
        }
    }
}

/// A value and its place.
pub(super) struct Node<'a> {
    value: &'a Value,
    path: Path<'a>,
    report: &'a Report<'a>,
}

impl<'a> Node<'a> {
    pub(super) fn root(value: &'a Value, report: &'a Report<'a>) -> Self {
        Self { value, path: Path::Root, report }
    }

    pub(super) fn path(&self) -> String {
        self.path.to_string()
    }

    /// Notes that this value is refused.
    pub(super) fn fault(&self, found: impl Into<String>, expected: impl Into<String>) {
        let source = self.report.source(self.value.tag()).to_owned();
        self.report.fault(Fault { path: self.path(), found: found.into(), expected: expected.into(), source });
    }

    /// Notes that this value, which may be shown, is refused.
    pub(super) fn refuse(&self, expected: impl Into<String>) {
        self.fault(shown(self.value), expected);
    }

    /// Notes that this is something whose work is not done.
    pub(super) fn not_yet(&self, instead: &str) {
        self.fault("a setting that is not supported yet", instead);
    }

    pub(super) fn warn(&self, what: &str) {
        self.report.warn(format!("{}: {what}", self.path));
    }

    /// A map with no fields but these.
    pub(super) fn fields<'b>(&'b self, known: &[&str]) -> Option<Fields<'b>> {
        self.fields_and_later(known, &[])
    }

    /// A map with no fields but these. The later ones, each with what to use instead, will mean something one day, and
    /// ignoring one would promise what does not happen.
    pub(super) fn fields_and_later<'b>(&'b self, known: &[&str], later: &[(&str, &str)]) -> Option<Fields<'b>> {
        let Value::Dict(_, dict) = self.value else {
            self.fault(kind(self.value), format!("a map of {}", known.join(", ")));
            return None;
        };
        let fields = Fields { dict, node: self };
        for name in dict.keys().filter(|name| !known.contains(&name.as_str())) {
            match later.iter().find(|(later, _)| later == name) {
                Some((later, instead)) => fields.get(later).into_iter().for_each(|node| node.not_yet(instead)),
                None => fields.unknown(name, known),
            }
        }
        Some(fields)
    }

    /// The items of a list, each with its place.
    pub(super) fn items<'b>(&'b self, expected: &str) -> Option<impl Iterator<Item = Node<'b>>> {
        let Value::Array(_, items) = self.value else {
            self.fault(kind(self.value), expected);
            return None;
        };
        let item = |(index, value)| Node { value, path: Path::Item(&self.path, index), report: self.report };
        Some(items.iter().enumerate().map(item))
    }

    /// The items of a list that may not be empty.
    pub(super) fn some_items<'b>(&'b self, expected: &str) -> Option<impl Iterator<Item = Node<'b>>> {
        let mut items = self.items(expected)?.peekable();
        if items.peek().is_none() {
            self.fault("an empty list", expected);
            return None;
        }
        Some(items)
    }

    pub(super) fn text(&self, expected: &str) -> Option<&'a str> {
        let text = self.value.as_str();
        if text.is_none() {
            self.refuse(expected);
        }
        text
    }

    /// Text where a name such as `7` or `true` is likely, which YAML takes for something else.
    pub(super) fn name(&self, expected: &str) -> Option<&'a str> {
        match self.value {
            Value::Num(..) | Value::Bool(..) => self.text(&format!("{expected}; put it in quotes")),
            _ => self.text(expected),
        }
    }

    /// Text that no message may show.
    pub(super) fn secret(&self, expected: &str) -> Option<&'a str> {
        let text = self.value.as_str();
        if text.is_none() {
            let hidden = if matches!(self.value, Value::Empty(..)) { "" } else { " (<redacted>)" };
            self.fault(format!("{}{hidden}", kind(self.value)), expected);
        }
        text
    }

    /// A whole number within bounds.
    pub(super) fn whole(&self, bounds: RangeInclusive<u64>) -> Option<u64> {
        let number = match self.value {
            Value::Num(_, number) => whole(*number),
            Value::String(tag, text) if self.report.is_variable(*tag) => digits(text),
            _ => None,
        };
        let number = number.filter(|number| bounds.contains(number));
        if number.is_none() {
            self.refuse(format!("a whole number from {} to {}", bounds.start(), bounds.end()));
        }
        number
    }

    pub(super) fn is(&self, text: &str) -> bool {
        self.value.as_str() == Some(text)
    }

    /// One of a few words.
    pub(super) fn choice<T: Copy>(&self, words: &[(&str, T)]) -> Option<T> {
        let chosen = self.value.as_str().and_then(|text| words.iter().find(|(word, _)| *word == text));
        if chosen.is_none() {
            self.refuse(alternatives(words.iter().map(|(word, _)| *word)));
        }
        chosen.map(|(_, value)| *value)
    }
}

pub(super) fn boolean(node: &Node<'_>) -> Option<bool> {
    let variable = |tag| node.report.is_variable(tag);
    match node.value {
        Value::Bool(_, value) => Some(*value),
        Value::String(tag, text) if variable(*tag) && text == "true" => Some(true),
        Value::String(tag, text) if variable(*tag) && text == "false" => Some(false),
        _ => {
            node.refuse("true or false");
            None
        }
    }
}

/// A map whose fields are all known.
pub(super) struct Fields<'a> {
    dict: &'a Dict,
    node: &'a Node<'a>,
}

impl Fields<'_> {
    pub(super) fn get<'b>(&'b self, name: &'b str) -> Option<Node<'b>> {
        let value = self.dict.get(name)?;
        Some(Node { value, path: Path::Field(&self.node.path, name), report: self.node.report })
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.dict.contains_key(name)
    }

    /// A field that must be there.
    pub(super) fn required<'b>(&'b self, name: &'b str, expected: &str) -> Option<Node<'b>> {
        let node = self.get(name);
        if node.is_none() {
            let missing = Node { path: Path::Field(&self.node.path, name), ..*self.node };
            missing.fault("nothing", expected);
        }
        node
    }

    /// A field that has a default. `None` where it is there and refused.
    pub(super) fn or<T>(&self, name: &str, default: T, read: impl FnOnce(&Node<'_>) -> Option<T>) -> Option<T> {
        self.get(name).map_or(Some(default), |node| read(&node))
    }

    /// A field that may be absent. The outer `None` where it is there and refused.
    #[expect(clippy::option_option, reason = "absent and refused are two different things")]
    pub(super) fn maybe<T>(&self, name: &str, read: impl FnOnce(&Node<'_>) -> Option<T>) -> Option<Option<T>> {
        self.get(name).map_or(Some(None), |node| read(&node).map(Some))
    }

    fn unknown(&self, name: &str, known: &[&str]) {
        let value = &self.dict[name];
        let meant = known.iter().find(|field| similar(name, field));
        let variable = self.node.report.is_variable(value.tag());
        let shown = if meant.is_some() || variable || harmless(name, value) { name } else { REDACTED };
        let one_underscore = |field: &&str| name.strip_prefix(field).is_some_and(|rest| rest.starts_with('_'));
        let hint = match meant {
            Some(field) => format!("; did you mean {field}?"),
            None if variable && known.iter().any(one_underscore) => "; two underscores lead into a field".to_owned(),
            None => String::new(),
        };
        let node = Node { value, path: Path::Field(&self.node.path, shown), report: self.node.report };
        node.fault("an unknown field", format!("{}{hint}", alternatives(known.iter().copied())));
    }
}

/// Whether a name that resembles no field can be shown: a key that slipped out of its list (`{ id: acme, s3cret }`)
/// is the name of a field too. Field names have no digits, and keys that people make hardly ever have none.
fn harmless(name: &str, value: &Value) -> bool {
    !matches!(value, Value::Empty(..))
        && name.bytes().all(|byte| byte.is_ascii_alphabetic() || matches!(byte, b'_' | b'-'))
}

/// Every value, or `None` where one was refused. All are read, so that all faults are noted.
pub(super) fn all<T>(values: impl Iterator<Item = Option<T>>) -> Option<Vec<T>> {
    let mut refused = false;
    let kept = values.filter_map(|value| {
        refused |= value.is_none();
        value
    });
    let kept: Vec<T> = kept.collect();
    (!refused).then_some(kept)
}

/// `a`, `a or b`, `a, b or c`.
pub(super) fn alternatives<'a>(words: impl Iterator<Item = &'a str>) -> String {
    let words: Vec<&str> = words.collect();
    match words.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => words.concat(),
    }
}

/// Digits and nothing else: no sign, no space, no underscore.
pub(super) fn digits(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

fn whole(number: Num) -> Option<u64> {
    number.to_u128().and_then(|number| u64::try_from(number).ok())
}

/// What kind of value it is, for where the value itself helps nobody or may be secret.
pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::String(..) => "text",
        Value::Char(..) => "a character",
        Value::Bool(..) => "true or false",
        Value::Num(..) => "a number",
        Value::Empty(..) => "nothing",
        Value::Dict(..) => "a map",
        Value::Array(..) => "a list",
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::String(_, text) => quoted(text),
        Value::Bool(_, value) => value.to_string(),
        Value::Num(_, number) => written(*number),
        _ => kind(value).to_owned(),
    }
}

fn written(number: Num) -> String {
    let natural = number.to_u128().map(|number| number.to_string());
    let whole = natural.or_else(|| number.to_i128().map(|number| number.to_string()));
    whole.or_else(|| number.to_f64().map(|number| format!("{number:?}"))).unwrap_or_else(|| "a number".to_owned())
}

/// Text in quotes on one line, cut where it grows long.
pub(super) fn quoted(text: &str) -> String {
    const LONGEST: usize = 60;
    let more = if text.chars().nth(LONGEST).is_some() { "…" } else { "" };
    let start: String = text.chars().take(LONGEST).collect();
    format!("\"{}{more}\"", start.escape_debug())
}

/// A field's name, which is foreign text too.
fn plain(name: &str) -> String {
    name.chars().take(64).flat_map(char::escape_debug).collect()
}

/// Whether one was probably meant as the other: equal but for case and separators, or two letters apart.
fn similar(name: &str, field: &str) -> bool {
    let bare = |text: &str| -> Vec<char> {
        let letters = text.chars().take(32).filter(|letter| !matches!(letter, '_' | '-'));
        letters.flat_map(char::to_lowercase).collect()
    };
    let (name, field) = (bare(name), bare(field));
    distance(&name, &field) <= (field.len() / 2).clamp(1, 2)
}

/// Letters to insert, drop or change (Levenshtein), one row at a time.
fn distance(from: &[char], to: &[char]) -> usize {
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (i, a) in from.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in to.iter().enumerate() {
            let change = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[to.len()]
}
