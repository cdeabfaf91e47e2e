//! Tables in Markdown.

/// A table whose rows come one by one.
pub struct Table {
    header: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these columns.
    pub fn new<'a>(header: impl IntoIterator<Item = &'a str>) -> Table {
        Table { header: header.into_iter().map(String::from).collect(), rows: Vec::new() }
    }

    /// Adds a row.
    pub fn row(&mut self, row: Vec<String>) {
        self.rows.push(row);
    }

    /// Prints it.
    pub fn print(&self) {
        println!("| {} |", self.header.join(" | "));
        println!("|{}", " --- |".repeat(self.header.len()));
        for row in &self.rows {
            println!("| {} |", row.join(" | "));
        }
        println!();
    }
}

/// A number as people read it.
pub fn number(value: f64) -> String {
    let digits = if value < 100.0 { return format!("{value:.1}") } else { format!("{value:.0}") };
    let mut grouped = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}
