//! Lists in pages, followed up to a limit.

use construct_proto::v1::{PageInfo, PageRequest};

use crate::failure::Failure;

/// The maximum size of a page in the API.
const MAX_PAGE_SIZE: u32 = 100;

/// Which part of a list to get, and in which order.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ListArgs {
    /// The maximum number; pages are followed until then.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
    /// Continue an earlier list: its next page token.
    #[arg(long, value_name = "TOKEN", default_value = "", hide_default_value = true)]
    page_token: String,
    /// `created_at`, `updated_at` or `name`, with ` asc` or ` desc`. Messages: `position asc` or
    /// `position desc`.
    #[arg(long, value_name = "FIELD", default_value = "", hide_default_value = true)]
    order_by: String,
}

/// Part of a list, and where it continues.
#[derive(Debug)]
pub(crate) struct Page<T> {
    pub(crate) items: Vec<T>,
    /// Empty at the end of the list.
    pub(crate) next_page_token: String,
}

impl ListArgs {
    /// Gets pages with `page` up to the limit.
    ///
    /// # Errors
    /// The error of `page`.
    pub(crate) async fn collect<T, F>(
        &self,
        mut page: impl FnMut(PageRequest) -> F,
    ) -> Result<Page<T>, Failure>
    where
        F: Future<Output = Result<(Vec<T>, Option<PageInfo>), Failure>>,
    {
        let mut items = Vec::new();
        let mut page_token = self.page_token.clone();
        loop {
            let remaining =
                self.limit.saturating_sub(u32::try_from(items.len()).unwrap_or(u32::MAX));
            let page_size = i32::try_from(remaining.min(MAX_PAGE_SIZE)).unwrap_or(i32::MAX);
            let (more, info) =
                page(PageRequest { page_size, page_token, order_by: self.order_by.clone() })
                    .await?;
            let empty = more.is_empty();
            items.extend(more);
            page_token = info.map(|info| info.next_page_token).unwrap_or_default();
            if page_token.is_empty() || empty || items.len() >= self.limit as usize {
                return Ok(Page { items, next_page_token: page_token });
            }
        }
    }
}

/// Gets a whole list, in its default order or `order_by`.
///
/// # Errors
/// The error of `page`.
pub(crate) async fn all<T, F>(
    order_by: &str,
    page: impl FnMut(PageRequest) -> F,
) -> Result<Vec<T>, Failure>
where
    F: Future<Output = Result<(Vec<T>, Option<PageInfo>), Failure>>,
{
    let everything =
        ListArgs { limit: u32::MAX, page_token: String::new(), order_by: order_by.to_owned() };
    Ok(everything.collect(page).await?.items)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A list of 250 numbers; the token is the offset.
    async fn numbers(page: PageRequest) -> Result<(Vec<u32>, Option<PageInfo>), Failure> {
        let from: u32 = page.page_token.parse().unwrap_or(0);
        let to = (from + u32::try_from(page.page_size).unwrap()).min(250);
        let next_page_token = if to < 250 { to.to_string() } else { String::new() };
        Ok(((from..to).collect(), Some(PageInfo { next_page_token })))
    }

    #[tokio::test]
    async fn pages_are_followed_up_to_the_limit() {
        for (limit, token, items, next) in
            [(5, "", 0..5, "5"), (120, "", 0..120, "120"), (900, "20", 20..250, "")]
        {
            let args = ListArgs { limit, page_token: token.to_owned(), order_by: String::new() };
            let listed = args.collect(numbers).await.unwrap();
            assert_eq!((listed.items, listed.next_page_token.as_str()), (items.collect(), next));
        }
        assert_eq!(all("", numbers).await.unwrap().len(), 250);
    }
}
