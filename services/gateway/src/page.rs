//! Pages of a list: size, order, and the token that leads to the next one.
//!
//! A token is the store's cursor of the last row (its order key and id), so that rows inserted or
//! removed meanwhile neither repeat nor hide others. It carries a digest over itself and its
//! context: method, organization, filter and order. A token that was altered, or is used with
//! another list, is refused instead of returning a page of something else. It grants nothing (every
//! query is filtered by organization), so the digest needs no key.

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use construct_domain::OrganizationId;
use construct_proto::{PagedRequest, v1::PageInfo};
use construct_store::{Cursor, CursorValue, MessageCursor, UsageCursor};
use prost::Message;
use serde::{Serialize, de::DeserializeOwned};
use sha2::{Digest as _, Sha256};

use crate::validate::Violations;

/// Default number of rows of a page.
const DEFAULT_SIZE: u32 = 50;
/// Maximum size of a page's entities in bytes, unless the page has a single one. It is below the
/// clients' default limit of 4 MiB.
const MAX_BYTES: usize = 2 * 1024 * 1024;
/// Maximum number of characters of a page token; real ones are far shorter.
const MAX_TOKEN_CHARS: usize = 1024;

/// A column that orders a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Column {
    CreatedAt,
    UpdatedAt,
    Name,
    Position,
    Day,
}

impl Column {
    /// For lists of entities without a name.
    pub(crate) const TIMES: [Self; 2] = [Self::CreatedAt, Self::UpdatedAt];
    /// For lists of named entities.
    pub(crate) const NAMED: [Self; 3] = [Self::CreatedAt, Self::UpdatedAt, Self::Name];
    const ALL: [Self; 5] =
        [Self::CreatedAt, Self::UpdatedAt, Self::Name, Self::Position, Self::Day];

    const fn as_str(self) -> &'static str {
        match self {
            Self::CreatedAt => "created_at",
            Self::UpdatedAt => "updated_at",
            Self::Name => "name",
            Self::Position => "position",
            Self::Day => "day",
        }
    }

    const fn key(self) -> construct_store::Key {
        match self {
            Self::CreatedAt | Self::Position | Self::Day => construct_store::Key::CreatedAt,
            Self::UpdatedAt => construct_store::Key::UpdatedAt,
            Self::Name => construct_store::Key::Name,
        }
    }
}

/// An order: a column and a direction. Rows with equal keys are ordered by id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Order {
    pub(crate) column: Column,
    pub(crate) descending: bool,
}

/// A position in a list: the store's cursor.
pub(crate) trait PagePosition: Serialize + DeserializeOwned {
    /// Whether it is a position in a list with this order.
    fn matches_order(&self, column: Column) -> bool;
}

impl PagePosition for Cursor {
    fn matches_order(&self, column: Column) -> bool {
        match self.value {
            CursorValue::Time(_) => matches!(column, Column::CreatedAt | Column::UpdatedAt),
            CursorValue::Name(_) => column == Column::Name,
        }
    }
}

impl PagePosition for MessageCursor {
    fn matches_order(&self, column: Column) -> bool {
        column == Column::Position
    }
}

impl PagePosition for UsageCursor {
    fn matches_order(&self, column: Column) -> bool {
        column == Column::Day
    }
}

/// A checked request for a page.
#[derive(Debug, Clone)]
pub(crate) struct Page<P> {
    /// Maximum number of rows.
    pub(crate) size: u32,
    pub(crate) order: Order,
    /// The last row of the previous page.
    pub(crate) after: Option<P>,
    scope: [u8; 32],
}

/// A token's content.
#[derive(Clone, PartialEq, Eq, Message)]
struct Token {
    #[prost(bytes = "vec", tag = "1")]
    digest: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    position: Vec<u8>,
}

impl<P: PagePosition> Page<P> {
    /// Parses a validated request for a page. `columns` are the allowed orders; the first is the
    /// default, newest first (messages: oldest first).
    pub(crate) fn read<R: PagedRequest>(
        request: &R,
        organization: OrganizationId,
        columns: &[Column],
        violations: &mut Violations,
    ) -> Self {
        // A token belongs to all other fields of the request.
        let mut scope = request.clone();
        let request = scope.page().take().unwrap_or_default();
        let size =
            if request.page_size == 0 { DEFAULT_SIZE } else { request.page_size.unsigned_abs() };
        let order = Order::read(&request.order_by, columns, violations);
        let mut digest = Sha256::new();
        let direction: &[u8] = if order.descending { b"desc" } else { b"asc" };
        let (column, scope) = (order.column.as_str().as_bytes(), scope.encode_to_vec());
        for part in [R::NAME.as_bytes(), organization.uuid().as_bytes(), column, direction, &scope]
        {
            digest.update((part.len() as u64).to_be_bytes());
            digest.update(part);
        }
        let mut page = Self { size, order, after: None, scope: digest.finalize().into() };
        if !request.page_token.is_empty() {
            page.after = page.open(&request.page_token);
            violations.require(page.after.is_some(), "page.page_token", || {
                "is not a token of this list with this filter and order; start again without a token".into()
            });
        }
        page
    }

    /// Converts the rows that were read, one more than a page has if there are so many, to a page
    /// and its info. A page that would become too large ends early.
    pub(crate) fn cut<T, R: Message>(
        &self,
        rows: &[T],
        show: impl Fn(&T) -> R,
        position: impl FnOnce(&T) -> P,
    ) -> (Vec<R>, PageInfo) {
        let (mut entities, mut bytes) = (Vec::new(), 0);
        for row in rows.iter().take(self.size as usize) {
            let entity = show(row);
            bytes += entity.encoded_len();
            // At least one entity is returned, or the list would never continue.
            if bytes > MAX_BYTES && !entities.is_empty() {
                break;
            }
            entities.push(entity);
        }
        let last = entities.len().checked_sub(1).filter(|_| entities.len() < rows.len());
        let next_page_token =
            last.map(|last| self.seal(&position(&rows[last]))).unwrap_or_default();
        (entities, PageInfo { next_page_token })
    }

    fn seal(&self, position: &P) -> String {
        let position =
            serde_json::to_vec(position).expect("a time, a name or numbers are always JSON");
        let digest = self.digest(&position);
        BASE64_URL_SAFE_NO_PAD.encode(Token { digest, position }.encode_to_vec())
    }

    fn open(&self, text: &str) -> Option<P> {
        if text.len() > MAX_TOKEN_CHARS {
            return None;
        }
        let bytes = BASE64_URL_SAFE_NO_PAD.decode(text).ok()?;
        let token = Token::decode(bytes.as_slice()).ok()?;
        if token.digest != self.digest(&token.position) {
            return None;
        }
        serde_json::from_slice::<P>(&token.position)
            .ok()
            .filter(|position| position.matches_order(self.order.column))
    }

    /// The digest of the position and its context.
    fn digest(&self, position: &[u8]) -> Vec<u8> {
        let mut digest = Sha256::new();
        digest.update(self.scope);
        digest.update(position);
        digest.finalize()[..16].to_vec()
    }
}

impl Page<Cursor> {
    /// For the store: one row more than asked for, to know whether there is a next page.
    pub(crate) fn query(&self) -> construct_store::Page {
        let order = construct_store::Order {
            key: self.order.column.key(),
            descending: self.order.descending,
        };
        construct_store::Page { limit: self.size + 1, order, after: self.after.clone() }
    }

    /// What the list is ordered by.
    pub(crate) fn key(&self) -> construct_store::Key {
        self.order.column.key()
    }
}

impl Page<MessageCursor> {
    /// For the store: one row more than asked for, to know whether there is a next page.
    pub(crate) fn query(&self) -> construct_store::MessagePage {
        construct_store::MessagePage {
            limit: self.size + 1,
            descending: self.order.descending,
            after: self.after,
        }
    }
}

impl Page<UsageCursor> {
    /// For the store: one row more than asked for, to know whether there is a next page.
    pub(crate) fn query(&self) -> construct_store::UsagePage {
        let Self { size, order, after, .. } = self;
        construct_store::UsagePage {
            limit: size + 1,
            descending: order.descending,
            after: after.clone(),
        }
    }
}

impl Order {
    fn read(text: &str, columns: &[Column], violations: &mut Violations) -> Self {
        let default = Self { column: columns[0], descending: columns[0] != Column::Position };
        let mut parts = text.split_ascii_whitespace();
        let Some(name) = parts.next() else { return default };
        let column = Column::ALL
            .into_iter()
            .find(|column| column.as_str() == name && columns.contains(column));
        let descending = match parts.next() {
            None | Some("asc") => Some(false),
            Some("desc") => Some(true),
            Some(_) => None,
        };
        match (column, descending, parts.next()) {
            (Some(column), Some(descending), None) => Self { column, descending },
            _ => {
                let names = columns
                    .iter()
                    .map(|column| format!("`{}`", column.as_str()))
                    .collect::<Vec<_>>()
                    .join(", ");
                violations.add(
                    "page.order_by",
                    format!("must be one of {names}, optionally followed by `asc` or `desc`"),
                );
                default
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use construct_proto::v1::{
        ListAgentsRequest, ListModelsRequest, PageRequest, list_agents_request::Filter,
        list_models_request,
    };
    use jiff::Timestamp;
    use proptest::prelude::*;
    use uuid::Uuid;

    use super::*;
    use crate::{
        tests::fuzz::fuzz,
        validate::{requests, tests::fields},
    };

    const COLUMNS: [Column; 3] = [Column::CreatedAt, Column::UpdatedAt, Column::Name];

    fn read(
        request: &PageRequest,
        method: &'static str,
        filter: &Filter,
    ) -> Result<Page<Cursor>, Vec<String>> {
        let page = Some(request.clone());
        let read = match method {
            "ListAgents" => {
                let request = ListAgentsRequest { page, filter: Some(filter.clone()) };
                requests::list(OrganizationId::LOCAL, &request, &COLUMNS)
            }
            // With the same encoded filter.
            "ListModels" => {
                let filter = list_models_request::Filter::decode(filter.encode_to_vec().as_slice());
                let request = ListModelsRequest { page, filter: filter.ok() };
                requests::list(OrganizationId::LOCAL, &request, &COLUMNS)
            }
            method => panic!("{method} is no list"),
        };
        read.map_err(|status| fields(&status))
    }

    fn time(micros: i64) -> CursorValue {
        CursorValue::Time(Timestamp::from_microsecond(micros).expect("a time of our age"))
    }

    fn token(request: &PageRequest, value: CursorValue) -> String {
        let page = read(
            &PageRequest { page_size: 1, ..request.clone() },
            "ListAgents",
            &Filter::default(),
        );
        let cursor = Cursor { value, id: Uuid::from_u128(7) };
        page.expect("the request is valid")
            .cut(&[(), ()], Clone::clone, |()| cursor)
            .1
            .next_page_token
    }

    #[test]
    fn token_returns_its_row() {
        for (order_by, value) in [
            ("", time(-5)),
            ("created_at asc", time(1_700_000_000_123_456)),
            ("name", CursorValue::Name("zeta".into())),
            ("name desc", CursorValue::Name(String::new())),
        ] {
            let mut request = PageRequest { order_by: order_by.into(), ..PageRequest::default() };
            request.page_token = token(&request, value.clone());
            let page = read(&request, "ListAgents", &Filter::default()).expect("the token is ours");
            assert_eq!(page.after, Some(Cursor { value, id: Uuid::from_u128(7) }), "{order_by}");
        }
    }

    #[test]
    fn token_of_another_list_filter_or_order_is_refused() {
        let first = PageRequest::default();
        let next = PageRequest { page_token: token(&first, time(1)), ..first };
        let other = Filter { name_prefix: "a".into(), ..Filter::default() };
        let ascending = PageRequest { order_by: "created_at asc".into(), ..next.clone() };
        assert!(read(&next, "ListAgents", &Filter::default()).is_ok());
        for refused in [
            read(&next, "ListModels", &Filter::default()),
            read(&next, "ListAgents", &other),
            read(&ascending, "ListAgents", &Filter::default()),
        ] {
            assert_eq!(refused.map(|_| ()), Err(vec!["page.page_token".to_owned()]));
        }
    }

    #[test]
    fn altered_token_is_refused() {
        let first = PageRequest::default();
        let good = token(&first, time(1_700_000_000_000_000));
        for index in 0..good.len() {
            let mut bytes = good.clone().into_bytes();
            bytes[index] = if bytes[index] == b'A' { b'B' } else { b'A' };
            let page_token = String::from_utf8(bytes).expect("still ASCII");
            let refused = read(
                &PageRequest { page_token, ..first.clone() },
                "ListAgents",
                &Filter::default(),
            );
            assert_eq!(refused.map(|_| ()), Err(vec!["page.page_token".to_owned()]), "at {index}");
        }
        for page_token in ["x", "!!!", "AAAA", &"A".repeat(5000)] {
            let request = PageRequest { page_token: page_token.into(), ..first.clone() };
            assert!(read(&request, "ListAgents", &Filter::default()).is_err(), "{page_token}");
        }
    }

    /// Altered, combined and invented tokens: an accepted token is unmodified and used for its
    /// list.
    #[test]
    fn forged_tokens_are_refused() {
        let orders =
            prop::sample::select(&["", "created_at asc", "name", "name desc", "updated_at"][..]);
        let value = prop_oneof![
            any::<i32>().prop_map(|micros| time(i64::from(micros))),
            ".{0,40}".prop_map(CursorValue::Name)
        ];
        let change = prop_oneof![
            Just(Vec::new()),
            prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        ];
        let input =
            (orders.clone(), orders, value, change, prop::option::of("[A-Za-z0-9_=-]{0,80}"));
        fuzz(&input, |(made_for, used_for, value, changes, made_up)| {
            let made_for = PageRequest { order_by: made_for.into(), ..PageRequest::default() };
            let good = token(&made_for, value.clone());
            let mut bytes = good.clone().into_bytes();
            for (index, byte) in changes {
                let index = index.index(bytes.len());
                bytes[index] = byte;
            }
            let page_token =
                made_up.unwrap_or_else(|| String::from_utf8_lossy(&bytes).into_owned());
            let used = PageRequest {
                order_by: used_for.into(),
                page_token: page_token.clone(),
                ..PageRequest::default()
            };
            let matches_order = |column| {
                Cursor { value: value.clone(), id: Uuid::from_u128(7) }.matches_order(column)
            };
            match read(&used, "ListAgents", &Filter::default()) {
                Ok(page) if page_token.is_empty() => prop_assert!(page.after.is_none()),
                Ok(page) => {
                    prop_assert_eq!(&page_token, &good);
                    prop_assert_eq!(page.after, Some(Cursor { value, id: Uuid::from_u128(7) }));
                    prop_assert_eq!(made_for.order_by, used.order_by);
                }
                Err(fields) => {
                    prop_assert_eq!(fields, ["page.page_token"]);
                    let column =
                        Order::read(&used.order_by, &COLUMNS, &mut Violations::new()).column;
                    let is_good = page_token == good && made_for.order_by == used.order_by;
                    prop_assert!(!(is_good && matches_order(column)), "a good token was refused");
                }
            }
            Ok(())
        });
    }

    #[test]
    fn page_size_is_1_to_100_and_50_by_default() {
        for (page_size, expected) in [
            (0, Some(50)),
            (1, Some(1)),
            (100, Some(100)),
            (101, None),
            (-1, None),
            (i32::MIN, None),
        ] {
            let page = read(
                &PageRequest { page_size, ..PageRequest::default() },
                "ListAgents",
                &Filter::default(),
            );
            assert_eq!(page.ok().map(|page| page.size), expected, "{page_size}");
        }
    }

    #[test]
    fn order_is_a_known_column_and_a_direction() {
        for (order_by, expected) in [
            ("", Some((Column::CreatedAt, true))),
            ("name", Some((Column::Name, false))),
            ("updated_at desc", Some((Column::UpdatedAt, true))),
            ("  name   asc ", Some((Column::Name, false))),
            ("position", None),
            ("name sideways", None),
            ("name asc desc", None),
            ("name; drop table agents", None),
        ] {
            let page = read(
                &PageRequest { order_by: order_by.into(), ..PageRequest::default() },
                "ListAgents",
                &Filter::default(),
            );
            assert_eq!(
                page.ok().map(|page| (page.order.column, page.order.descending)),
                expected,
                "{order_by}"
            );
        }
    }

    #[test]
    fn last_page_has_no_token() {
        let page = read(
            &PageRequest { page_size: 2, ..PageRequest::default() },
            "ListAgents",
            &Filter::default(),
        );
        let page = page.expect("the request is valid");
        for full in 0..=2 {
            let rows = vec![(); full];
            let (entities, info) =
                page.cut(&rows, Clone::clone, |()| unreachable!("there is no next page"));
            assert_eq!((entities.len(), info), (full, PageInfo::default()));
        }
    }

    #[test]
    fn page_of_large_entities_ends_early_and_continues() {
        let rows: Vec<String> =
            [900, 900, 900, 5_000, 900, 1].map(|kib| "x".repeat(kib * 1024)).into();
        let by_name = PageRequest { order_by: "name".into(), ..PageRequest::default() };
        let (mut request, mut begin, mut sizes) = (by_name, 0, Vec::new());
        loop {
            let page =
                read(&request, "ListAgents", &Filter::default()).expect("the request is valid");
            if let Some(Cursor { value: CursorValue::Name(name), .. }) = &page.after {
                assert_eq!(
                    name,
                    &rows[begin - 1].len().to_string(),
                    "the token leads on from the last one shown"
                );
            }
            let position = |row: &String| Cursor {
                value: CursorValue::Name(row.len().to_string()),
                id: Uuid::nil(),
            };
            let (entities, info) = page.cut(&rows[begin..], Clone::clone, position);
            assert_eq!(entities, rows[begin..begin + entities.len()]);
            begin += entities.len();
            sizes.push(entities.len());
            if info.next_page_token.is_empty() {
                break;
            }
            request.page_token = info.next_page_token;
        }
        assert_eq!(sizes, [2, 1, 1, 2], "one that is too large stands alone");
    }

    #[test]
    fn forged_position_of_another_order_is_refused() {
        let by_time = read(&PageRequest::default(), "ListAgents", &Filter::default())
            .expect("the request is valid");
        let page_token =
            by_time.seal(&Cursor { value: CursorValue::Name("x".into()), id: Uuid::nil() });
        assert!(
            read(
                &PageRequest { page_token, ..PageRequest::default() },
                "ListAgents",
                &Filter::default()
            )
            .is_err()
        );
    }
}
