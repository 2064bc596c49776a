//! A YAML file as a source of figment.
//!
//! figment's own YAML source keeps the last of two equal keys, so that half of a pasted file wins in silence. This one
//! refuses them, and says in which line.

use std::collections::btree_map::Entry;
use std::fmt;

use figment::value::{Dict, Empty, Map, Num, Tag, Value};
use figment::{Error, Metadata, Profile, Provider};
use serde::de::{self, DeserializeSeed, Deserializer, EnumAccess, MapAccess, SeqAccess, Visitor};

const FIELD_NAME: &str = "the name of a field";
const TWICE: &str = "a field given twice";
const TAG: &str = "a tag such as !name, which means nothing here";
/// What is refused here although it is YAML.
const OWN: [&str; 2] = [TWICE, TAG];

/// The text of a file, and what to call it in a fault.
pub(super) struct Yaml<'a> {
    pub(super) name: &'a str,
    pub(super) bytes: &'a [u8],
}

impl Provider for Yaml<'_> {
    fn metadata(&self) -> Metadata {
        Metadata::named(self.name.to_owned())
    }

    /// An error's path is the place in the text, its message what was found there.
    fn data(&self) -> Result<Map<Profile, Dict>, Error> {
        let fields = parse(self.bytes)
            .map_err(|bad| Error::from(bad.found).with_path(&format!("line {}, column {}", bad.line, bad.column)));
        Ok(Profile::Default.collect(fields?))
    }
}

/// Why a text is no map of fields; lines and columns count from 1.
struct Unreadable {
    found: String,
    line: usize,
    column: usize,
}

impl Unreadable {
    fn whole(found: &str) -> Self {
        Self { found: found.to_owned(), line: 1, column: 1 }
    }
}

fn parse(bytes: &[u8]) -> Result<Dict, Unreadable> {
    let text = std::str::from_utf8(bytes).map_err(|error| not_utf8(&bytes[..error.valid_up_to()]))?;
    let text = text.trim_start_matches('\u{feff}');
    if text.lines().all(|line| matches!(line.trim_start().as_bytes().first(), None | Some(b'#'))) {
        return Err(Unreadable::whole("an empty file"));
    }
    match Any.deserialize(serde_yaml::Deserializer::from_str(text)) {
        Ok(Value::Dict(_, fields)) => Ok(fields),
        Ok(other) => Err(Unreadable::whole(super::reader::kind(&other))),
        Err(error) => Err(not_yaml(&error)),
    }
}

fn not_utf8(before: &[u8]) -> Unreadable {
    let mut lines = before.split(|byte| *byte == b'\n').rev();
    let column = lines.next().map_or(0, <[u8]>::len) + 1;
    Unreadable { found: "bytes that are not UTF-8".to_owned(), line: lines.count() + 1, column }
}

/// The parser's messages name places and tokens of YAML, never a scalar: [`Any`] has no type to be disappointed in.
fn not_yaml(error: &serde_yaml::Error) -> Unreadable {
    let message = error.to_string();
    let what = message.split(" at line ").next().unwrap_or(&message);
    let what = what.rsplit(": ").next().unwrap_or(what);
    let found = if what.ends_with(FIELD_NAME) {
        "a field whose name is not text".to_owned()
    } else if OWN.contains(&what) {
        what.to_owned()
    } else {
        format!("text that is not YAML ({what})")
    };
    let (line, column) = error.location().map_or((1, 1), |at| (at.line().max(1), at.column().max(1)));
    Unreadable { found, line, column }
}

/// Reads any YAML value.
struct Any;

impl<'de> DeserializeSeed<'de> for Any {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Any {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(Tag::Default, value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Num(Tag::Default, Num::I64(value)))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Num(Tag::Default, Num::U64(value)))
    }

    fn visit_i128<E>(self, value: i128) -> Result<Value, E> {
        Ok(Value::Num(Tag::Default, Num::I128(value)))
    }

    fn visit_u128<E>(self, value: u128) -> Result<Value, E> {
        Ok(Value::Num(Tag::Default, Num::U128(value)))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Value::Num(Tag::Default, Num::F64(value)))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(Tag::Default, value.to_owned()))
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Empty(Tag::Default, Empty::Unit))
    }

    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Empty(Tag::Default, Empty::None))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element_seed(Any)? {
            items.push(item);
        }
        Ok(Value::Array(Tag::Default, items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut fields = Dict::new();
        while let Some(name) = map.next_key_seed(NewField(&fields))? {
            let value = map.next_value_seed(Any)?;
            if let Entry::Vacant(field) = fields.entry(name) {
                field.insert(value);
            }
        }
        Ok(Value::Dict(Tag::Default, fields))
    }

    fn visit_enum<A: EnumAccess<'de>>(self, _: A) -> Result<Value, A::Error> {
        Err(de::Error::custom(TAG))
    }
}

/// Reads a field's name that the map does not have yet. Refused here and not in the map, so that the error's line is
/// that of the second name.
struct NewField<'a>(&'a Dict);

impl<'de> DeserializeSeed<'de> for NewField<'_> {
    type Value = String;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<String, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for NewField<'_> {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(FIELD_NAME)
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<String, E> {
        if self.0.contains_key(name) {
            return Err(E::custom(TWICE));
        }
        Ok(name.to_owned())
    }
}
